"""Decide late which steps are kept whatever the sampler said: those that failed, went NaN, or were slow."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

from torchotel._records import StepRecord

WINDOW = 200  # steps that a step is compared with
MIN_STEPS = 20  # before that, what is slow is not known
SLOW = 1.5  # times the 95th percentile


class TailSampler:
    """Look at steps in the order that they end, and say which are interesting."""

    def __init__(self) -> None:
        # Each kind among its like: detail takes time of its own.
        self._detailed, self._plain = _Window(), _Window()

    def reason(self, unit: StepRecord, nonfinite: Sequence[str]) -> str | None:
        """Return error, nan or slow; None where nothing is remarkable. Evaluations are never slow."""
        like = self._detailed if unit.detailed else self._plain
        slow = unit.kind == "step" and like.is_slow(unit.end_ns - unit.start_ns)
        if unit.error is not None:
            return "error"
        if nonfinite:
            return "nan"
        return "slow" if slow else None


class _Window:
    """The durations of the last steps, as they came and by length."""

    def __init__(self) -> None:
        self._recent_ns: deque[int] = deque()
        self._sorted_ns: list[int] = []

    def is_slow(self, duration_ns: int) -> bool:
        """Compare with those before, and be one of them from now on."""
        recent_ns, sorted_ns = self._recent_ns, self._sorted_ns
        known = len(sorted_ns) >= MIN_STEPS
        slow = known and duration_ns > SLOW * sorted_ns[int(0.95 * (len(sorted_ns) - 1))]
        if len(recent_ns) == WINDOW:
            del sorted_ns[bisect_left(sorted_ns, recent_ns.popleft())]
        recent_ns.append(duration_ns)
        insort(sorted_ns, duration_ns)
        return slow
