"""Decide when PyTorch's flight recorder is read: only while no step ends, and ever less often."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from torchotel._collectives import CollectiveReading

STALL_FACTOR: Final = 10
"""A stall lasts at least this number of times the 95th percentile of the last steps."""
MAX_STEPS: Final = 256
"""Steps whose durations are kept."""
FIRST_STEP_FACTOR: Final = 5
"""Before the end of the first step the limit is longer by this factor: devices start, and caches are empty."""
SECOND_READING_S: Final = 10.0
"""Longest time from the first reading to the second one: only two readings show that no number moves."""


class StallLimit:
    """Derive the time without an event that counts as a stall from the durations of the last steps.

    Args:
        timeout_s: Shortest time that counts.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._durations_s: deque[float] = deque(maxlen=MAX_STEPS)

    def add_step(self, duration_s: float) -> None:
        """Note the duration of a step."""
        self._durations_s.append(duration_s)

    @property
    def seconds(self) -> float:
        """The limit."""
        ordered = sorted(self._durations_s)
        if not ordered:
            return FIRST_STEP_FACTOR * self._timeout_s
        return max(self._timeout_s, STALL_FACTOR * ordered[int(0.95 * (len(ordered) - 1))])


class ReadingSchedule:
    """Schedule readings: the first at the limit, the second soon, and each later one after twice the time."""

    def __init__(self) -> None:
        self._next_s = 0.0
        """Time without an event of the next reading; 0: of the first one."""

    def is_due(self, quiet_s: float, limit_s: float) -> bool:
        """Return whether the flight recorder is to be read now; called about once a second.

        Args:
            quiet_s: Time without an event.
            limit_s: Time that counts as a stall.
        """
        if quiet_s < limit_s:
            self._next_s = 0.0
            return False
        if quiet_s < self._next_s:
            return False
        self._next_s = 2 * quiet_s if self._next_s else quiet_s + min(limit_s, SECOND_READING_S)
        return True


class CollectiveWatch:
    """Read the flight recorder on the worker thread of the training process, if no record arrives.

    Args:
        read: Reads the flight recorder; None: there is no process group.
        timeout_s: Shortest time without a record that counts as a stall.
    """

    def __init__(self, read: Callable[[], CollectiveReading | None], timeout_s: float) -> None:
        self._read, self._limit, self._schedule = read, StallLimit(timeout_s), ReadingSchedule()
        self._last_s: float | None = None

    def note_record(self, now_s: float) -> None:
        """Note that a record has arrived."""
        self._last_s = now_s

    def note_step(self, duration_s: float) -> None:
        """Note the duration of a step."""
        self._limit.add_step(duration_s)

    def check(self, now_s: float) -> CollectiveReading | None:
        """Return a reading if one is due, and if there is a process group; the time counts from the first call."""
        if self._last_s is None:
            self._last_s = now_s
        quiet_s = now_s - self._last_s
        if not self._schedule.is_due(quiet_s, self._limit.seconds):
            return None
        reading = self._read()
        return None if reading is None else reading._replace(quiet_s=quiet_s)
