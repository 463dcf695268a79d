"""Clocks: this machine's against the endpoint's, and the one that durations are taken with."""

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
"""A module call is stamped four times."""
_STEADY_S = 0.01
"""Most that the two clocks may differ over the seconds of a check: more, and one of them was set."""


class Steadiness:
    """Watch the wall clock against the monotonic one, from its making on."""

    def __init__(self) -> None:
        self._offset_ns = _offset_ns()

    def check(self) -> Iterator[Finding]:
        """Tell whether the wall clock was set meanwhile, and what a reading costs."""
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


def compare(date: str | None, sent_s: float, received_s: float) -> Finding | None:
    """Compare with the date of an answer to a request that was sent and answered then; None where it has none.

    A date has whole seconds, cut off: what is told is the least by which the clocks differ.
    """
    try:
        theirs_s = parsedate_to_datetime(date or "").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None
    ahead_s = sent_s - (theirs_s + 1)
    behind_s = theirs_s - received_s
    skew_s = max(ahead_s, behind_s)
    if skew_s <= MAX_SKEW_S:
        return ok(SUBJECT, "within a second of the endpoint's clock")
    way = "ahead of" if ahead_s > behind_s else "behind"
    advice = "Spans of this machine and of others do not line up: check NTP (timedatectl, chronyc)."
    return warning(SUBJECT, f"at least {skew_s:.1f} s {way} the endpoint's clock", advice)


def _offset_ns() -> float:
    """Give the difference of the clocks; the median, since another program may run between two readings."""
    return median(time.time_ns() - time.perf_counter_ns() for _ in range(9))
