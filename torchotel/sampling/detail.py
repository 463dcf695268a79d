"""Choose the steps that are recorded in detail, by the measured overhead of detail."""

from collections import deque
from collections.abc import Iterable, Sequence
from math import ceil, log2, sqrt

from torchotel._records import Alignment, StepRecord

FIRST_STEPS = 10
WHILE_MEASURING = 8
"""Sampling interval until the overhead of detail is measured."""
EVALUATIONS_EVERY = 64

# Odd constants whose multiples spread over 64 bits: Steele, Lea and Flood, "Fast splittable pseudorandom number
# generators", 2014, https://doi.org/10.1145/2660193.2660195.
GOLDEN_64 = 0x9E3779B97F4A7C15
SPREAD_64 = 0xBF58476D1CE4E5B9
MIX_64 = 0x94D049BB133111EB
MASK_64 = (1 << 64) - 1


class Detail:
    """Decide whether a step is recorded in detail: by its number or, with "auto" and several ranks, by its alignment.

    Args:
        setting: "auto": the first ten steps, then one in each block of `every`; "all"; "off"; n: every n-th.
    """

    def __init__(self, setting: str | int) -> None:
        self.always = setting in {"all", 1}
        self.steered = setting == "auto"
        """Whether the session sets `every` by the measured overhead."""
        self.every = setting if isinstance(setting, int) else {"auto": WHILE_MEASURING, "all": 1}.get(setting, 0)
        """The sampling interval of steps and, unless `steered`, of evaluations; 0: none is detailed."""
        self._first = FIRST_STEPS if self.steered else 0
        self._asked = range(0)

    def ask(self, first: int, steps: int) -> None:
        """Record these steps in detail, too, whatever the setting."""
        last = max(first + steps, self._asked.stop if first in self._asked else 0)
        self._asked = range(first, last)

    def of_step(self, number: int, alignment: Alignment | None = None) -> bool:
        """Return whether the step with this number is detailed; with "auto", all ranks agree by its alignment."""
        if alignment is None or number < self._first or not self.steered:
            return number in self._asked or self._is_due(number, self.every)
        return number in self._asked or hash_of(alignment) < (1 << 64) // self.every

    def of_evaluation(self, number: int) -> bool:
        """Return whether the evaluation with this number is detailed; with "auto" rarely: its cost is not measured."""
        return self._is_due(number, max(self.every, EVALUATIONS_EVERY) if self.steered else self.every)

    def reason(self, number: int) -> str:
        """Return why a detailed step is kept, as `torch.kept.reason`."""
        return "first" if number < self._first else "sampled"

    def _is_due(self, number: int, every: int) -> bool:
        if number < self._first or not every:
            return number < self._first
        return is_chosen(number, every) if self.steered else number % every == 0


def hash_of(alignment: Alignment) -> int:
    """Return 64 bits that look random and are the same on all ranks."""
    mixed = (alignment[0] * GOLDEN_64 + alignment[1] * SPREAD_64 + GOLDEN_64) & MASK_64
    for constant, shift in ((SPREAD_64, 30), (MIX_64, 27)):
        mixed = (mixed ^ mixed >> shift) * constant & MASK_64
    return mixed ^ mixed >> 31


def is_chosen(number: int, every: int) -> bool:
    """Return whether a number is the chosen one of its block of `every` numbers, a power of two.

    The position in the block varies from block to block. Otherwise all or none of a program's every 8th or 100th steps
    would be detailed, and their extra time would count as overhead. All ranks choose the same numbers. A block chooses
    the number of one of its halves, so the chosen numbers of a longer interval are also those of a shorter one.
    """
    half = 1
    while half < every:
        block = number // (2 * half)
        chosen_half = (block * GOLDEN_64 + half * SPREAD_64) >> 63 & 1
        if (number // half) % 2 != chosen_half:
            return False
        half *= 2
    return True


MIN_INTERVAL = 2
"""At least every other step has no detail, since the overhead is measured against these steps."""
MAX_INTERVAL = 4096


def sampling_interval(budget: float, slowdown: float, current: int) -> int:
    """Return the interval at which detail stays within the overhead budget.

    The interval is a power of two, so that the steps of a long interval are detailed on ranks with a shorter one, too.
    It grows to the needed value at once, and shrinks by half at a time, since a measurement is uncertain.

    Args:
        budget: Share of step time that detail may cost.
        slowdown: Relative slowdown of a detailed step.
        current: The present interval.
    """
    exponent = ceil(log2(max(1.0, slowdown / budget)))
    return min(max(1 << exponent, current // 2, MIN_INTERVAL), MAX_INTERVAL)


MAX_COMPARED = 16
"""Detailed steps whose slowdown counts: the last ones."""
MIN_COMPARED = 5
"""Detailed steps before the first estimate."""
MAX_PLAIN = 8
"""Steps without detail that a detailed step is compared with: the last ones before it."""
MAX_RECENT = 1 << 13
"""Steps in which the share of detailed steps is counted."""

# https://en.wikipedia.org/wiki/Median_absolute_deviation (ratio of sigma to the deviation of a normal distribution) and
# https://en.wikipedia.org/wiki/Median#Efficiency (ratio of the standard errors of median and mean).
SIGMA_PER_DEVIATION = 1.4826
MEDIAN_ERROR = 1.2533
ONE_SIDED_95 = 1.645


class Overhead:
    """Measure the overhead of detail by comparing steps; one thread adds steps, and any thread may read."""

    def __init__(self) -> None:
        self._plain_ns: deque[int] = deque(maxlen=MAX_PLAIN)
        self._slowdowns: deque[float] = deque(maxlen=MAX_COMPARED)
        self._slowdown = 0.0
        """Median of the relative slowdowns of detailed steps."""
        self._recent: deque[bool] = deque(maxlen=MAX_RECENT)
        self._recent_detailed = 0
        self._began = False
        self.ratio: float | None = None
        """Share of step time that detail costs; None until enough steps with and without detail were compared."""
        self.upper_bound: float | None = None
        """One-sided 95 % upper bound of the relative slowdown of detailed steps."""

    def add(self, step: StepRecord, worker_ns: int = 0) -> None:
        """Add a step. The first steps do not count: they warm up, and most of them are detailed.

        Args:
            step: The step.
            worker_ns: CPU time of the worker for the step: a training that is bound by Python waits for it.
        """
        cost_ns = step.end_ns - step.start_ns - step.between_ns + worker_ns
        if self._began and step.reason != "first":
            self._count(detailed=step.detailed)
            if not step.detailed:
                self._plain_ns.append(cost_ns)
            elif self._plain_ns:
                self._compare(cost_ns / max(1.0, _median(self._plain_ns)) - 1)
        self._began = True
        if len(self._slowdowns) >= MIN_COMPARED:
            self.ratio = max(0.0, self._recent_detailed / len(self._recent) * self._slowdown)

    def _count(self, *, detailed: bool) -> None:
        if len(self._recent) == MAX_RECENT:
            self._recent_detailed -= self._recent[0]
        self._recent.append(detailed)
        self._recent_detailed += detailed

    def _compare(self, slowdown: float) -> None:
        self._slowdowns.append(slowdown)
        self._slowdown = _median(self._slowdowns)
        if len(self._slowdowns) >= MIN_COMPARED:
            self.upper_bound = _upper_bound(self._slowdowns, self._slowdown)


def _upper_bound(values: Sequence[float], median: float) -> float:
    """Return the upper end of the one-sided 95 % confidence interval of the median."""
    sigma = SIGMA_PER_DEVIATION * _median(abs(value - median) for value in values)
    return median + ONE_SIDED_95 * MEDIAN_ERROR * sigma / sqrt(len(values))


def _median(values: Iterable[float]) -> float:
    """Return the median; `statistics.median` would import fractions and decimal."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return (ordered[half] + ordered[~half]) / 2
