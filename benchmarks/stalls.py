"""Stalls of a training thread: the longest gap between two consecutive operators."""

from __future__ import annotations

from time import perf_counter_ns

from torch import Tensor


def longest_gap_ns(small: Tensor, until_ns: int) -> int:
    """Run operators until `until_ns`, each of which releases and acquires the GIL. Return the longest duration.

    The operators allocate nothing, because after a training malloc sometimes spends 6 ms on consolidation.
    """
    longest_ns, last_ns = 0, perf_counter_ns()
    while last_ns < until_ns:
        small.neg_()
        now_ns = perf_counter_ns()
        longest_ns = max(longest_ns, now_ns - last_ns)
        last_ns = now_ns
    return longest_ns
