"""How often a step may be detailed, for what that costs."""

from math import ceil, log2

MOST_OFTEN = 2
"""The others are what detail is measured against."""
LEAST_OFTEN = 4096


def every_within(budget: float, longer: float, now: int) -> int:
    """Return n such that detail in every n-th step stays within a budget.

    It is a power of two, so that ranks which chose differently still share the rarer steps. What is too dear becomes
    rarer at once; what is cheap doubles at each call, since the next measurement may think otherwise.

    Args:
        budget: Share of step time that detail may cost.
        longer: By what share a detailed step is longer.
        now: What n was.
    """
    rarer = ceil(log2(max(1.0, longer / budget)))
    return min(max(1 << rarer, now // 2, MOST_OFTEN), LEAST_OFTEN)
