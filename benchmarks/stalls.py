"""How long a training thread waits for its turn: the gap between two operators that should follow at once."""

from __future__ import annotations

from time import perf_counter_ns

from torch import Tensor


def longest_gap_ns(small: Tensor, until_ns: int) -> int:
    """Run operators until then, each of which lets go of the GIL and takes it again; return the longest one's time.

    They allocate nothing: where a model was trained before, malloc tidies up for 6 ms now and then.
    """
    longest_ns, last_ns = 0, perf_counter_ns()
    while last_ns < until_ns:
        small.neg_()
        now_ns = perf_counter_ns()
        longest_ns = max(longest_ns, now_ns - last_ns)
        last_ns = now_ns
    return longest_ns
