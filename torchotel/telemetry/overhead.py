"""What detail costs: measured against the steps without it, while the training runs."""

from collections import deque
from statistics import median

from torchotel._records import Unit

WINDOW = 1024  # steps; with one detailed step in 64 it holds 16 of them
FEWEST = 5  # of each kind, before which a median says little


class Overhead:
    """Compare detailed steps with the others over a recent window."""

    def __init__(self, window: int = WINDOW) -> None:
        self._steps: deque[tuple[int, bool]] = deque(maxlen=window)
        self._began = False

    def add(self, step: Unit) -> None:
        """Take note of a step, but for those that warm up: they are slow, and most are detailed for being the first."""
        if self._began and step.reason != "first":
            self._steps.append((step.end_ns - step.start_ns, step.detailed))
        self._began = True

    def ratio(self) -> float | None:
        """Return the share of step time that detail costs; None until enough steps of both kinds were seen.

        The share of detailed steps, times what the median one of them takes longer than the median one without.
        """
        steps = list(self._steps)
        detailed = [duration_ns for duration_ns, is_detailed in steps if is_detailed]
        others = [duration_ns for duration_ns, is_detailed in steps if not is_detailed]
        if min(len(detailed), len(others)) < FEWEST or not median(others):
            return None
        longer = median(detailed) / median(others) - 1
        return max(0.0, len(detailed) / len(steps) * longer)
