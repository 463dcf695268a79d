"""Decide late which steps are kept whatever the sampler said: those that failed, went NaN, or were slow."""

from collections import deque
from collections.abc import Sequence

from torchotel._records import Unit

WINDOW = 200  # steps that a step is compared with
FEWEST = 20  # before that, what is slow is not known
SLOW = 1.5  # times the 95th percentile


class Keeper:
    """Look at steps in the order that they end, and say which are interesting."""

    def __init__(self) -> None:
        # Each kind among its like: detail takes time of its own.
        self._detailed_ns: deque[int] = deque(maxlen=WINDOW)
        self._plain_ns: deque[int] = deque(maxlen=WINDOW)

    def reason(self, unit: Unit, nonfinite: Sequence[str]) -> str | None:
        """Return error, nan or slow; None where nothing is remarkable. Evaluations are never slow."""
        slow = unit.kind == "step" and _slow(
            unit.end_ns - unit.start_ns, self._detailed_ns if unit.detailed else self._plain_ns
        )
        if unit.error is not None:
            return "error"
        if nonfinite:
            return "nan"
        return "slow" if slow else None


def _slow(duration_ns: int, durations_ns: deque[int]) -> bool:
    """Compare with those before, and be one of them from now on."""
    earlier = sorted(durations_ns)
    durations_ns.append(duration_ns)
    return len(earlier) >= FEWEST and duration_ns > SLOW * earlier[int(0.95 * (len(earlier) - 1))]
