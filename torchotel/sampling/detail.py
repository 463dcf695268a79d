"""Choose the steps that are recorded in detail, by what detail costs."""

from collections import deque
from collections.abc import Iterable, Sequence
from math import ceil, log2, sqrt

from torchotel._records import StepRecord

FIRST_STEPS = 10
WHILE_MEASURING = 8
"""One step of so many is detailed until it is known what that costs."""
EVALUATIONS_EVERY = 64

# Odd constants whose multiples spread over 64 bits: Steele, Lea and Flood, "Fast splittable pseudorandom number
# generators", 2014, https://doi.org/10.1145/2660193.2660195.
GOLDEN_64 = 0x9E3779B97F4A7C15
SPREAD_64 = 0xBF58476D1CE4E5B9


class Detail:
    """Decide by a step's number.

    Args:
        setting: "auto" (the first ten steps, then one of each `every`), "all", "off", or n for every n-th.
    """

    def __init__(self, setting: str | int) -> None:
        self.always = setting in {"all", 1}
        self.steered = setting == "auto"
        """Whether somebody measures what detail costs and sets `every`."""
        self.every = setting if isinstance(setting, int) else {"auto": WHILE_MEASURING, "all": 1}.get(setting, 0)
        """0: none; of steps, and unless it is steered of evaluations too."""
        self._first = FIRST_STEPS if self.steered else 0
        self._asked = range(0)

    def ask(self, first: int, steps: int) -> None:
        """Record these steps too, whatever the setting."""
        last = max(first + steps, self._asked.stop if first in self._asked else 0)
        self._asked = range(first, last)

    def of_step(self, number: int) -> bool:
        """Tell whether the step with this number is detailed."""
        return number in self._asked or self._is_due(number, self.every)

    def of_evaluation(self, number: int) -> bool:
        """Tell whether the evaluation with this number is: nobody measures what that costs, so they stay rare."""
        return self._is_due(number, max(self.every, EVALUATIONS_EVERY) if self.steered else self.every)

    def reason(self, number: int) -> str:
        """Say why a detailed step is kept."""
        return "first" if number < self._first else "sampled"

    def _is_due(self, number: int, every: int) -> bool:
        if number < self._first or not every:
            return number < self._first
        return is_chosen(number, every) if self.steered else number % every == 0


def is_chosen(number: int, every: int) -> bool:
    """Tell whether a number is the one that is chosen of its block of `every`, a power of two.

    Where in the block it stands changes from block to block: what a program does every 8th or 100th step would
    otherwise come with detail always or never, and be taken for its cost. The same numbers are chosen on every rank,
    and what is chosen of a larger block is chosen of the smaller ones too: each takes that of one of its halves.
    """
    half = 1
    while half < every:
        block = number // (2 * half)
        takes_second = (block * GOLDEN_64 + half * SPREAD_64) >> 63 & 1
        if (number // half) % 2 != takes_second:
            return False
        half *= 2
    return True


MIN_INTERVAL = 2
"""The others are what detail is measured against."""
MAX_INTERVAL = 4096


def sampling_interval(budget: float, longer: float, now: int) -> int:
    """Return n such that detail in every n-th step stays within a budget.

    It is a power of two, so that ranks which chose differently still share the rarer steps. What is too dear becomes
    rarer at once; what is cheap doubles at each call, since the next measurement may think otherwise.

    Args:
        budget: Share of step time that detail may cost.
        longer: By what share a detailed step is longer.
        now: What n was.
    """
    rarer = ceil(log2(max(1.0, longer / budget)))
    return min(max(1 << rarer, now // 2, MIN_INTERVAL), MAX_INTERVAL)


COMPARED = 16  # detailed steps that count
MIN_STEPS = 5  # before which a median says little
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

    def add(self, step: StepRecord, worked_ns: int = 0) -> None:
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
        if len(self._longer) >= MIN_STEPS:
            self.ratio = max(0.0, self._recent_detailed / len(self._recent) * self._usual)

    def _take_note(self, *, detailed: bool) -> None:
        if len(self._recent) == WINDOW:
            self._recent_detailed -= self._recent[0]
        self._recent.append(detailed)
        self._recent_detailed += detailed

    def _compare(self, longer: float) -> None:
        self._longer.append(longer)
        self._usual = _median(self._longer)
        if len(self._longer) >= MIN_STEPS:
            self.at_most = _upper_bound(self._longer, self._usual)


def _upper_bound(values: Sequence[float], middle: float) -> float:
    """Return the upper end of the one-sided interval of 95 % in which the median of such values lies."""
    sigma = SIGMAS_IN_DEVIATION * _median(abs(value - middle) for value in values)
    return middle + ONE_SIDED_95 * MEDIANS_ERROR * sigma / sqrt(len(values))


def _median(values: Iterable[float]) -> float:
    """As that of `statistics`, which brings in fractions and decimals."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return (ordered[half] + ordered[~half]) / 2
