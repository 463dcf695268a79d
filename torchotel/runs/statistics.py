"""Compute the ratio of two series' median times, with a confidence interval.

The interval of one median is Woodruff's ("Confidence intervals for medians and other position measures", Journal of
the American Statistical Association 47 (1952), 635-646): an interval of the share of steps below the median is read
back as two order statistics of the series. It assumes no distribution and is robust against single slow steps. If
steps alternate between two levels, it lies between these levels. The two medians'
intervals, in logarithms, are joined by Zou and Donner's method of variance estimates recovery ("Construction of
confidence limits about effect measures", Statistics in Medicine 27 (2008), 1693-1702). No random numbers are drawn:
the same runs give the same interval.

Consecutive steps are correlated (another program on the machine, heat). Therefore the standard error of the
share grows with how long steps stay on one side of the median: the long-run variance of their signs is estimated from
the slowest cosines, with Student's t instead of the normal distribution (Lazarus, Lewis, Stock and Watson, "HAR
inference: recommendations for practice", Journal of Business & Economic Statistics 36 (2018), 541-559). The number of
cosines grows as in that paper, but is smaller, for series with a longer memory. The error is never below that of
independent steps. A whole run can be slower for another reason, such as another machine or a lower clock. Only a
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

MIN_STEPS = 5
"""Values of a series that an interval needs at least."""
MIN_COSINES = 6
"""Cosines of a series of twice as many steps or more. With fewer, Student's t makes the interval very wide."""
COSINES = 0.22
"""The number of cosines is this factor times steps ** (2 / 3). The paper recommends 0.4, for less persistent series."""
OUTLIERS = 0.1
"""Share of a series at either end whose values do not widen the interval, such as steps that hung."""
MIN_TIME_S = 1e-9
"""Smallest time in seconds: a time of 0 has no logarithm. A nanosecond is the clock's resolution."""


class Ratio(NamedTuple):
    """The ratio of two medians, with its confidence interval."""

    value: float
    low: float
    """Lower end of the interval."""
    high: float
    """Upper end of the interval."""

    @property
    def is_noise(self) -> bool:
        """Whether the interval contains 1, so that no difference was shown."""
        return self.low <= 1 <= self.high


def ratio(before_s: Sequence[float], after_s: Sequence[float], *, confidence: float) -> Ratio:
    """Return the median of `after_s` by that of `before_s`; both have at least `MIN_STEPS` values in step order."""
    (low, before, high), (after_low, after, after_high) = (_median(s, confidence) for s in (before_s, after_s))
    value = after - before
    below, above = math.hypot(after - after_low, high - before), math.hypot(after_high - after, before - low)
    return Ratio(*map(_exp, (value, value - below, value + above)))


def ratio_of_runs(before_s: Sequence[float], after_s: Sequence[float], *, confidence: float) -> Ratio:
    """Return the ratio of the geometric means of several runs' medians, of three runs at least in all."""
    sides = [list(map(_log, medians_s)) for medians_s in (before_s, after_s)]
    means = list(map(fmean, sides))
    freedom = sum(map(len, sides)) - len(sides)
    squares = math.fsum((run - mean) ** 2 for side, mean in zip(sides, means, strict=True) for run in side)
    error = math.sqrt(squares / freedom * sum(1 / len(side) for side in sides))
    value, reach = means[1] - means[0], _student(confidence, freedom) * error
    return Ratio(*map(_exp, (value, value - reach, value + reach)))


def typical(medians_s: Sequence[float]) -> float:
    """Return the geometric mean of several runs' medians in seconds, which `ratio_of_runs` compares."""
    return _exp(fmean(map(_log, medians_s)))


def _median(series: Sequence[float], confidence: float) -> tuple[float, float, float]:
    """Return logarithms: the lower end of the median's interval, the median, and the upper end."""
    ordered, steps = sorted(series), len(series)
    error = math.sqrt(max(1.0, _persistence(series)) / steps) / 2
    reach = _student(confidence, _cosine_count(steps)) * error
    read = min(reach, 0.5 - OUTLIERS)
    low, middle, high = (_log(quantile(ordered, share)) for share in (0.5 - read, 0.5, 0.5 + read))
    # Beyond the outlier share, the interval is extrapolated in proportion.
    return middle - (middle - low) * reach / read, middle, middle + (high - middle) * reach / read


def _persistence(series: Sequence[float]) -> float:
    """Estimate the variance of the share of steps below the median, relative to that of independent steps."""
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
    return max(min(MIN_COSINES, steps // 2), round(COSINES * math.cbrt(steps) ** 2))


def _student(confidence: float, freedom: int) -> float:
    """Return Student's two-sided quantile, found by bisection (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    low, high = 0.0, math.pi / 2
    while low < (angle := (low + high) / 2) < high:
        low, high = (angle, high) if _student_chance(angle, freedom) < confidence else (low, angle)
    return math.sqrt(freedom) * math.tan(low)


def _student_chance(angle: float, freedom: int) -> float:
    """Return the probability of |t| below sqrt(freedom) * tan(angle)."""
    odd = freedom % 2
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * math.cos(angle) ** 2
    total *= math.sin(angle)
    return (angle + total) * 2 / math.pi if odd else total


def _log(seconds: float) -> float:
    return math.log(max(seconds, MIN_TIME_S))


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))  # a larger exponent overflows to infinity
