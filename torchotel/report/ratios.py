"""How much longer one series of times is than another, and whether that is more than noise.

The ratio of the medians with the interval of Price and Bonett, "Distribution-free confidence intervals for difference
and ratio of medians", Journal of Statistical Computation and Simulation 72 (2002), 119-124: each median's standard
error, in logarithms, is read off the two order statistics about sqrt(n) places around it, so no distribution is
assumed and one step of a second among steps of a millisecond moves nothing. Computed, not drawn: the same runs give the
same interval each time.

Steps that follow each other are alike (a neighbour on the machine, heat), which makes any interval that counts each
one as news too narrow. So a long series is cut into blocks of steps in a row, and each block's median counts once, as
in the method of batch means: Schmeiser, "Batch size effects in the analysis of simulation output", Operations Research
30 (1982), 556-568, who finds 10 to 30 batches to be enough. What makes a whole run slower (another machine, a clock
that was throttled from start to end) is not noise to it: only a further run can tell that.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import NormalDist, median
from typing import NamedTuple

FEWEST = 5
"""Values of a series, below which nothing is said about noise."""
BLOCKS = range(10, 31)
BLOCK_STEPS = 8
"""Steps of a block, where that makes a number in `BLOCKS`."""
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
    errors = [_standard_error(_blocks(series)) for series in (before_s, after_s)]
    value = _log(median(after_s)) - _log(median(before_s))
    reach = NormalDist().inv_cdf(0.5 + confidence / 2) * math.hypot(*errors)
    return Ratio(*map(_exp, (value, value - reach, value + reach)))


def _blocks(series: Sequence[float]) -> Sequence[float]:
    count = min(len(series), max(BLOCKS[0], min(BLOCKS[-1], len(series) // BLOCK_STEPS)))
    edges = [len(series) * place // count for place in range(count + 1)]
    return [median(series[start:end]) for start, end in pairwise(edges)]


def _standard_error(values: Sequence[float]) -> float:
    """Estimate that of the median's logarithm."""
    ordered, n = sorted(values), len(values)
    place = max(1, round((n + 1) / 2 - math.sqrt(n)))
    # Chance that the median lies outside of the two order statistics, on one side.
    outside = sum(math.comb(n, k) for k in range(place)) / 2**n
    width = _log(ordered[n - place]) - _log(ordered[place - 1])
    return width / (2 * NormalDist().inv_cdf(1 - outside))


def _log(seconds: float) -> float:
    return math.log(max(seconds, SHORTEST_S))


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))  # beyond that a float is infinite
