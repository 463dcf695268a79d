"""How much longer one series of times is than another, and whether that is more than noise.

The ratio of the medians with the interval of Price and Bonett, "Distribution-free confidence intervals for difference
and ratio of medians", Journal of Statistical Computation and Simulation 72 (2002), 119-124: each median's standard
error, in logarithms, is read off the two order statistics about sqrt(n) places around it, so no distribution is
assumed and one step of a second among steps of a millisecond moves nothing. Computed, not drawn: the same runs give the
same interval each time.

Steps that follow each other are alike (a neighbour on the machine, heat), which makes any interval that counts each
one as news too narrow. So the error is widened by how long steps stay on one side of the median: the long-run variance
of their signs, read off the slowest cosines, with Student's t for so few of them instead of the normal distribution.
See Lazarus, Lewis, Stock and Watson, "HAR inference: recommendations for practice", Journal of Business & Economic
Statistics 36 (2018), 541-559; the two series' degrees of freedom are joined as Welch and Satterthwaite do. Few cosines
and never a narrower interval than that of unlike steps: it misses a small change rather than cries wolf, and longer
runs find it. What makes a whole run slower (another machine, a clock that was throttled from start to end) is not
noise to it: only a further run can tell that.

Of several runs, the runs: their medians are what is compared, in logarithms, by Student's t with one spread for both
sides, so a side may have one run alone. How the steps vary within a run is in how the medians do.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from functools import lru_cache
from operator import mul
from statistics import NormalDist, fmean, median
from typing import NamedTuple

FEWEST = 5
"""Values of a series, below which nothing is said about noise."""
COSINES = range(3, 7)
"""How many of the slowest a series is held against."""
COSINE_STEPS = 100
"""Steps for each, where that makes a number in `COSINES`: more would be too quick to see what lasts."""
SHORTEST_S = 1e-9
"""What a time of 0 counts as, since it has no logarithm: a nanosecond, the clock's own step."""
_ROUNDING = 1e-9
"""Equal errors give a whole number, which floating point may fall short of."""


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
    errors = [_standard_error(series) for series in (before_s, after_s)]
    value = _log(median(after_s)) - _log(median(before_s))
    freedom = _freedom(errors, [_cosine_count(len(series)) for series in (before_s, after_s)])
    return _interval(value, _student(confidence, freedom) * math.hypot(*errors))


def ratio_of_runs(before_s: Sequence[float], after_s: Sequence[float], *, confidence: float) -> Ratio:
    """Divide the typical of `after_s` by that of `before_s`; a run's median each, three in all at least."""
    sides = [list(map(_log, medians_s)) for medians_s in (before_s, after_s)]
    means = list(map(fmean, sides))
    freedom = sum(map(len, sides)) - len(sides)
    squares = math.fsum((run - mean) ** 2 for side, mean in zip(sides, means, strict=True) for run in side)
    error = math.sqrt(squares / freedom * sum(1 / len(side) for side in sides))
    return _interval(means[1] - means[0], _student(confidence, freedom) * error)


def typical(medians_s: Sequence[float]) -> float:
    """Give the middle of several runs' medians: their geometric mean, as `ratio_of_runs` divides them."""
    return _exp(fmean(map(_log, medians_s)))


def _standard_error(series: Sequence[float]) -> float:
    """Estimate that of the median's logarithm."""
    ordered = sorted(series)
    place, errors = _order_statistics(len(series))
    width = _log(ordered[-1 - place]) - _log(ordered[place])
    return width / errors * math.sqrt(max(1.0, _persistence(series)))


@lru_cache(maxsize=16)  # the layers of a run have the same steps
def _order_statistics(n: int) -> tuple[int, float]:
    """Choose two, as far from either end, and say how many standard errors of the median lie between them."""
    place = max(0, round((n + 1) / 2 - math.sqrt(n)) - 1)
    # Chance that the median lies beyond one of them; by logarithms, since 2**n is soon more than a float holds.
    logs = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(place + 1))
    beyond = math.fsum(math.exp(log - n * math.log(2)) for log in logs)
    return place, 2 * NormalDist().inv_cdf(1 - beyond)


def _persistence(series: Sequence[float]) -> float:
    """Estimate how many times the variance of the median is that of steps which tell nothing of each other."""
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
    return max(COSINES[0], min(COSINES[-1], steps // COSINE_STEPS))


def _freedom(errors: Sequence[float], counts: Sequence[int]) -> int:
    parts = sum(error**4 / count for error, count in zip(errors, counts, strict=True))
    return int(math.hypot(*errors) ** 4 / parts + _ROUNDING) if parts else min(counts)


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


def _interval(value: float, reach: float) -> Ratio:
    return Ratio(*map(_exp, (value, value - reach, value + reach)))


def _log(seconds: float) -> float:
    return math.log(max(seconds, SHORTEST_S))


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))  # beyond that a float is infinite
