"""The clocks."""

import time

from torchotel._clock import Clock, ManualClock, SystemClock


def test_reads_the_machine_clocks() -> None:
    clock: Clock = SystemClock()
    before = time.perf_counter_ns(), time.time_ns()
    read = clock.monotonic_ns(), clock.unix_ns()
    assert before[0] <= read[0] <= time.perf_counter_ns()
    assert before[1] <= read[1] <= time.time_ns()


def test_stands_still_until_moved() -> None:
    clock = ManualClock(monotonic_ns=5, unix_ns=100)
    assert (clock.monotonic_ns(), clock.monotonic_ns(), clock.unix_ns()) == (5, 5, 100)
    clock.advance(1.5)
    assert (clock.monotonic_ns(), clock.unix_ns()) == (1_500_000_005, 1_500_000_100)
    clock.set_unix(7)
    assert (clock.monotonic_ns(), clock.unix_ns()) == (1_500_000_005, 7)
