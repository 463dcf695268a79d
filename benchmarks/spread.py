"""Medians and ratios with confidence intervals."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import comb
from statistics import median
from typing import TypedDict

TAIL = 0.025
DRAWS = 1000
FEWEST = 6
"""Fewest values for an interval, whose bounds then are the smallest and the largest value."""


class Spread(TypedDict):
    """A median or a ratio of means with its 95 % confidence interval."""

    median: float
    low: float
    high: float
    count: int
    """Number of values; with fewer than `FEWEST` the bounds are meaningless."""


def spread(values: Sequence[float]) -> Spread:
    """Return the median, with bounds from the sorted values. With fewer than six values these are the extremes.

    Each value is above the true median with probability 1/2:
    https://en.wikipedia.org/wiki/Median#Confidence_interval.
    """
    ordered = sorted(values)
    outside = _outside(len(ordered))
    return Spread(median=median(ordered), low=ordered[outside], high=ordered[-1 - outside], count=len(ordered))


def ratio_of_means(pairs: Sequence[tuple[float, float]]) -> Spread:
    """Return the ratio of means, for values that a few outliers dominate. The bounds are from resampled pairs.

    https://en.wikipedia.org/wiki/Bootstrapping_(statistics)#Case_resampling.
    """
    generator = random.Random(0)
    drawn = sorted(_ratio(generator.choices(pairs, k=len(pairs))) for _ in range(DRAWS))
    outside = int(TAIL * DRAWS)
    return Spread(median=_ratio(pairs), low=drawn[outside], high=drawn[-1 - outside], count=len(pairs))


def ratio_of_medians(values: Sequence[float], others: Sequence[float]) -> Spread:
    """Return the ratio of medians. The bounds are from resampling both, because neither is exact."""
    generator = random.Random(0)

    def drawn(found: Sequence[float]) -> float:
        return median(generator.choices(found, k=len(found)))

    ratios = sorted(drawn(values) / drawn(others) for _ in range(DRAWS))
    outside = int(TAIL * DRAWS)
    count = min(len(values), len(others))
    return Spread(median=median(values) / median(others), low=ratios[outside], high=ratios[-1 - outside], count=count)


def percent(ratio: Spread) -> Spread:
    """Return a ratio as the percentage above one."""
    median_, low, high = (100 * (ratio[name] - 1) for name in ("median", "low", "high"))
    return Spread(median=median_, low=low, high=high, count=ratio["count"])


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(one for one, _ in pairs) / sum(other for _, other in pairs)


def _outside(count: int) -> int:
    """Return the number of values outside the interval at each end."""
    ways, outside = 1, 0
    while ways / 2**count <= TAIL:
        outside += 1
        ways += comb(count, outside)
    return max(0, outside - 1)
