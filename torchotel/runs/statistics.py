"""The ratio of two series' median times, with a confidence interval.

The interval of one median is Woodruff's ("Confidence intervals for medians and other position measures", Journal of
the American Statistical Association 47 (1952), 635-646): an interval of the share of steps below the median is read
back as two order statistics of the series. It assumes no distribution, one step of a second among steps of a
millisecond moves nothing, and where steps jump between two levels it lies between these levels. The two medians'
intervals, in logarithms, are joined by Zou and Donner's method of variance estimates recovery ("Construction of
confidence limits about effect measures", Statistics in Medicine 27 (2008), 1693-1702). No random numbers are drawn:
the same runs give the same interval.

Steps that follow each other are alike (another program on the machine, heat). Therefore the standard error of the
share grows with how long steps stay on one side of the median: the long-run variance of their signs is estimated from
the slowest cosines, with Student's t instead of the normal distribution (Lazarus, Lewis, Stock and Watson, "HAR
inference: recommendations for practice", Journal of Business & Economic Statistics 36 (2018), 541-559). The number of
cosines grows as in that paper, but is smaller, for series with a longer memory, and the error is never below that of
independent steps. A whole run can be slower for another reason, such as another machine or a lower clock: only a
further run shows that.

Several runs of a side are compared by their medians, in logarithms, by Student's t with one spread for both sides, so
a side may have a single run. The variation of steps within a run is part of the variation of the medians.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from functools import lru_cache
from operator import mul
from statistics import fmean, median
from typing import NamedTuple

from torchotel.runs.summary import quantile

FEWEST = 5
"""Values of a series, below which nothing is said about noise."""
FEWEST_COSINES = 6
"""Of a series that has twice as many steps: fewer make Student's t, and so the interval, very wide."""
COSINES = 0.22
"""Times steps ** (2 / 3) is the number of cosines. 0.4 is recommended, for less persistent series."""
OUTLIERS = 0.1
"""Share of a series at either end whose values do not widen the interval: steps that hung."""
SHORTEST_S = 1e-9
"""What a time of 0 counts as, since it has no logarithm: a nanosecond, the clock's own step."""


class Ratio(NamedTuple):
    """A median by another."""

    value: float
    low: float
    """Of the interval."""
    high: float

    @property
    def is_noise(self) -> bool:
        """Whether no difference at all would explain it as well."""
        return self.low <= 1 <= self.high


def ratio(before_s: Sequence[float], after_s: Sequence[float], *, confidence: float) -> Ratio:
    """Divide the median of `after_s` by that of `before_s`; both in the order of the steps, `FEWEST` at least."""
    (low, before, high), (after_low, after, after_high) = (_median(s, confidence) for s in (before_s, after_s))
    value = after - before
    below, above = math.hypot(after - after_low, high - before), math.hypot(after_high - after, before - low)
    return Ratio(*map(_exp, (value, value - below, value + above)))


def ratio_of_runs(before_s: Sequence[float], after_s: Sequence[float], *, confidence: float) -> Ratio:
    """Divide the typical of `after_s` by that of `before_s`; a run's median each, three in all at least."""
    sides = [list(map(_log, medians_s)) for medians_s in (before_s, after_s)]
    means = list(map(fmean, sides))
    freedom = sum(map(len, sides)) - len(sides)
    squares = math.fsum((run - mean) ** 2 for side, mean in zip(sides, means, strict=True) for run in side)
    error = math.sqrt(squares / freedom * sum(1 / len(side) for side in sides))
    value, reach = means[1] - means[0], _student(confidence, freedom) * error
    return Ratio(*map(_exp, (value, value - reach, value + reach)))


def typical(medians_s: Sequence[float]) -> float:
    """Give the middle of several runs' medians: their geometric mean, as `ratio_of_runs` divides them."""
    return _exp(fmean(map(_log, medians_s)))


def _median(series: Sequence[float], confidence: float) -> tuple[float, float, float]:
    """Return the median's logarithm between the two ends of its interval."""
    ordered, steps = sorted(series), len(series)
    error = math.sqrt(max(1.0, _persistence(series)) / steps) / 2
    reach = _student(confidence, _cosine_count(steps)) * error
    read = min(reach, 0.5 - OUTLIERS)
    low, middle, high = (_log(quantile(ordered, share)) for share in (0.5 - read, 0.5, 0.5 + read))
    # An interval that reaches into the outliers grows in proportion instead.
    return middle - (middle - low) * reach / read, middle, middle + (high - middle) * reach / read


def _persistence(series: Sequence[float]) -> float:
    """Estimate the variance of the share of steps below the median, as a multiple of that of independent steps."""
    middle = median(series)
    signs = [(value > middle) - (value < middle) for value in series]
    return fmean(sum(map(mul, signs, cosine)) ** 2 for cosine in _cosines(len(series))) * 2 / len(series)


@lru_cache(maxsize=16)
def _cosines(steps: int) -> Sequence[array[float]]:
    return [
        array("d", (math.cos(math.pi * waves * (step + 0.5) / steps) for step in range(steps)))
        for waves in range(1, _cosine_count(steps) + 1)
    ]


def _cosine_count(steps: int) -> int:
    return max(min(FEWEST_COSINES, steps // 2), round(COSINES * math.cbrt(steps) ** 2))


def _student(confidence: float, freedom: int) -> float:
    """Give how far Student's t reaches to either side: Abramowitz and Stegun 26.7.3 and 26.7.4, halved down to it."""
    low, high = 0.0, math.pi / 2
    while low < (angle := (low + high) / 2) < high:
        low, high = (angle, high) if _student_chance(angle, freedom) < confidence else (low, angle)
    return math.sqrt(freedom) * math.tan(low)


def _student_chance(angle: float, freedom: int) -> float:
    """Give the chance of |t| below sqrt(freedom) * tan(angle)."""
    odd = freedom % 2
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * math.cos(angle) ** 2
    total *= math.sin(angle)
    return (angle + total) * 2 / math.pi if odd else total


def _log(seconds: float) -> float:
    return math.log(max(seconds, SHORTEST_S))


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))  # beyond that a float is infinite
