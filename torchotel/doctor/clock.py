"""Check the clocks: this machine's against the endpoint's, and the clock that measures durations."""

import time
from collections.abc import Iterator
from datetime import UTC
from email.utils import parsedate_to_datetime
from itertools import pairwise
from statistics import median

from torchotel.doctor.result import Finding, ok, warning

SUBJECT = "clock"
MAX_SKEW_S = 1.0
_READINGS = 10_000
_SLOW_NS = 500
"""Cost of a clock reading above which a warning is given; a module call reads the clock four times."""
_STEADY_S = 0.01
"""Largest difference between the two clocks' progress during the checks; a larger one means that a clock was set."""


class ClockCheck:
    """Compare the wall clock with the monotonic clock, from construction to `check`."""

    def __init__(self) -> None:
        self._offset_ns = _offset_ns()

    def check(self) -> Iterator[Finding]:
        """Report whether the wall clock was set during the checks, and the cost of a clock reading."""
        moved_s = (_offset_ns() - self._offset_ns) / 1e9
        if abs(moved_s) > _STEADY_S:
            advice = "Durations are still correct, but spans of different machines do not line up: check NTP."
            yield warning(SUBJECT, f"the wall clock moved by {moved_s:+.3f} s during the checks", advice)
        readings = [time.perf_counter_ns() for _ in range(_READINGS)]
        cost_ns = median(later - earlier for earlier, later in pairwise(readings))
        if any(later < earlier for earlier, later in pairwise(readings)):
            yield warning(
                SUBJECT, "time.perf_counter went back", "Durations are wrong on this machine: check its clock source."
            )
        elif cost_ns > _SLOW_NS:
            advice = "On Linux, /sys/devices/system/clocksource/clocksource0/current_clocksource should be tsc."
            yield warning(SUBJECT, f"a reading of the clock takes {cost_ns:.0f} ns", advice)
        elif abs(moved_s) <= _STEADY_S:
            yield ok(SUBJECT, f"wall clock and monotonic clock agree, a reading takes {cost_ns:.0f} ns")


def compare_with_server(date: str | None, sent_s: float, received_s: float) -> Finding | None:
    """Compare this machine's clock with the `Date` header of a response; None if there is no valid header.

    `Date` has whole seconds, rounded down, so the result is a lower bound of the difference.

    Args:
        date: The header.
        sent_s: Unix time of the request.
        received_s: Unix time of the response.
    """
    try:
        server_s = parsedate_to_datetime(date or "").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None
    ahead_s = sent_s - (server_s + 1)
    behind_s = server_s - received_s
    skew_s = max(ahead_s, behind_s)
    if skew_s <= MAX_SKEW_S:
        return ok(SUBJECT, "within a second of the endpoint's clock")
    direction = "ahead of" if ahead_s > behind_s else "behind"
    advice = "Spans of this machine and of others do not line up: check NTP (timedatectl, chronyc)."
    return warning(SUBJECT, f"at least {skew_s:.1f} s {direction} the endpoint's clock", advice)


def _offset_ns() -> float:
    """Return the offset between the clocks; a median, since the thread may be suspended between readings."""
    return median(time.time_ns() - time.perf_counter_ns() for _ in range(9))
