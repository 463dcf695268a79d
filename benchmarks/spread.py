"""Medians and ratios, and how sure they are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import comb
from statistics import median
from typing import TypedDict

TAIL = 0.025
DRAWS = 1000
FEWEST = 6
"""Values whose least and greatest are bounds."""


class Spread(TypedDict):
    """A median, or a ratio of means, and the bounds between which it lies 95 times of a hundred."""

    median: float
    low: float
    high: float
    count: int
    """Of the values; with fewer than `FEWEST` the bounds say nothing."""


def spread(values: Sequence[float]) -> Spread:
    """Take the bounds from the values themselves; of fewer than six they are the least and the greatest.

    Each value lies above the true median as often as a coin shows heads:
    https://en.wikipedia.org/wiki/Median#Confidence_interval.
    """
    ordered = sorted(values)
    outside = _outside(len(ordered))
    return Spread(median=median(ordered), low=ordered[outside], high=ordered[-1 - outside], count=len(ordered))


def ratio_of_means(pairs: Sequence[tuple[float, float]]) -> Spread:
    """Return the mean of the one over that of the other, where a few of many count; bounds by drawing pairs anew.

    https://en.wikipedia.org/wiki/Bootstrapping_(statistics)#Case_resampling.
    """
    generator = random.Random(0)  # noqa: S311  # no secret
    drawn = sorted(_ratio(generator.choices(pairs, k=len(pairs))) for _ in range(DRAWS))
    outside = int(TAIL * DRAWS)
    return Spread(median=_ratio(pairs), low=drawn[outside], high=drawn[-1 - outside], count=len(pairs))


def ratio_of_medians(values: Sequence[float], others: Sequence[float]) -> Spread:
    """Return the median of the one over that of the other; bounds by drawing both anew, for neither is exact."""
    generator = random.Random(0)  # noqa: S311  # no secret

    def drawn(found: Sequence[float]) -> float:
        return median(generator.choices(found, k=len(found)))

    ratios = sorted(drawn(values) / drawn(others) for _ in range(DRAWS))
    outside = int(TAIL * DRAWS)
    count = min(len(values), len(others))
    return Spread(median=median(values) / median(others), low=ratios[outside], high=ratios[-1 - outside], count=count)


def percent(ratio: Spread) -> Spread:
    """Return by how many percent a ratio is above one."""
    median_, low, high = (100 * (ratio[name] - 1) for name in ("median", "low", "high"))
    return Spread(median=median_, low=low, high=high, count=ratio["count"])


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(one for one, _ in pairs) / sum(other for _, other in pairs)


def _outside(count: int) -> int:
    """Return how many values may be left out at either end."""
    ways, outside = 1, 0
    while ways / 2**count <= TAIL:
        outside += 1
        ways += comb(count, outside)
    return max(0, outside - 1)
