"""Medians, and how sure they are."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import median
from typing import TypedDict

TAIL = 0.025
FEWEST = 6
"""Values whose least and greatest are bounds."""


class Spread(TypedDict):
    """A median, and the bounds between which it lies 95 times of a hundred."""

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


def _outside(count: int) -> int:
    """Return how many values may be left out at either end."""
    ways, outside = 1, 0
    while ways / 2**count <= TAIL:
        outside += 1
        ways += comb(count, outside)
    return max(0, outside - 1)
