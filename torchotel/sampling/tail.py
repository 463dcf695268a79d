"""Tail sampling: keep the steps that failed, had non-finite values or were slow, whatever the head sampler decided."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

from torchotel._records import StepRecord

MAX_COMPARED = 200
"""Steps that a step is compared with: the last ones before it."""
MIN_COMPARED = 20
"""Steps before the first one that can be slow."""
SLOW_FACTOR = 1.5
"""A step is slow if it takes longer than this multiple of the 95th percentile."""


class TailSampler:
    """Decide which steps are kept, in the order in which they end."""

    def __init__(self) -> None:
        # Detail takes time, so steps with and without it are compared separately.
        self._detailed, self._plain = _Window(), _Window()

    def reason(self, record: StepRecord, nonfinite: Sequence[str]) -> str | None:
        """Return error, nan or slow; None if the head sampler decides. Evaluations are never slow."""
        window = self._detailed if record.detailed else self._plain
        slow = record.kind == "step" and window.add(record.end_ns - record.start_ns)
        if record.error is not None:
            return "error"
        if nonfinite:
            return "nan"
        return "slow" if slow else None


class _Window:
    """The durations of the last steps, in their order and sorted."""

    def __init__(self) -> None:
        self._recent_ns: deque[int] = deque()
        self._sorted_ns: list[int] = []

    def add(self, duration_ns: int) -> bool:
        """Return whether a step of this duration is slow, compared with the steps before it."""
        recent_ns, sorted_ns = self._recent_ns, self._sorted_ns
        known = len(sorted_ns) >= MIN_COMPARED
        slow = known and duration_ns > SLOW_FACTOR * sorted_ns[int(0.95 * (len(sorted_ns) - 1))]
        if len(recent_ns) == MAX_COMPARED:
            del sorted_ns[bisect_left(sorted_ns, recent_ns.popleft())]
        recent_ns.append(duration_ns)
        insort(sorted_ns, duration_ns)
        return slow
