"""What detail costs: each detailed step against the plain ones before it, while the training runs."""

from collections import deque
from collections.abc import Iterable, Sequence
from math import sqrt

from torchotel._records import Unit

COMPARED = 16  # detailed steps that count
FEWEST = 5  # before which a median says little
BEFORE = 8  # plain steps that a detailed one is compared with
WINDOW = 1 << 13  # steps whose share of detailed ones counts

# Of the normal distribution: https://en.wikipedia.org/wiki/Median_absolute_deviation and, for the median's own error,
# https://en.wikipedia.org/wiki/Median#Efficiency.
SIGMAS_IN_DEVIATION = 1.4826
MEDIANS_ERROR = 1.2533
ONE_SIDED_95 = 1.645


class Overhead:
    """Compare steps with detail to those without, as they end; read from any thread, written by one."""

    def __init__(self) -> None:
        self._plain_ns: deque[int] = deque(maxlen=BEFORE)
        self._longer: deque[float] = deque(maxlen=COMPARED)
        self._usual = 0.0
        """By what share a detailed step is longer: the median."""
        self._recent: deque[bool] = deque(maxlen=WINDOW)
        self._recent_detailed = 0
        self._began = False
        self.ratio: float | None = None
        """Share of step time that detail costs; None until enough steps of both kinds were seen."""
        self.at_most: float | None = None
        """By what share a detailed step is longer than a plain one, at most: 95 times of a hundred."""

    def add(self, step: Unit, worked_ns: int = 0) -> None:
        """Take note of a step, but for those that warm up: they are slow, and most are detailed for being the first.

        Args:
            step: As it is handed over.
            worked_ns: What it took of the worker's time, for which a training that is bound by Python waits.
        """
        taken_ns = step.end_ns - step.start_ns - step.between_ns + worked_ns
        if self._began and step.reason != "first":
            self._take_note(detailed=step.detailed)
            if not step.detailed:
                self._plain_ns.append(taken_ns)
            elif self._plain_ns:
                self._compare(taken_ns / max(1.0, _median(self._plain_ns)) - 1)
        self._began = True
        if len(self._longer) >= FEWEST:
            self.ratio = max(0.0, self._recent_detailed / len(self._recent) * self._usual)

    def _take_note(self, *, detailed: bool) -> None:
        if len(self._recent) == WINDOW:
            self._recent_detailed -= self._recent[0]
        self._recent.append(detailed)
        self._recent_detailed += detailed

    def _compare(self, longer: float) -> None:
        self._longer.append(longer)
        self._usual = _median(self._longer)
        if len(self._longer) >= FEWEST:
            self.at_most = _at_most(self._longer, self._usual)


def _at_most(values: Sequence[float], middle: float) -> float:
    """Return the upper end of the one-sided interval of 95 % in which the median of such values lies."""
    sigma = SIGMAS_IN_DEVIATION * _median(abs(value - middle) for value in values)
    return middle + ONE_SIDED_95 * MEDIANS_ERROR * sigma / sqrt(len(values))


def _median(values: Iterable[float]) -> float:
    """As that of `statistics`, which brings in fractions and decimals."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return (ordered[half] + ordered[~half]) / 2
