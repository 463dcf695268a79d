"""Which steps are recorded in detail."""

FIRST_STEPS = 10
WHILE_MEASURING = 8
"""One step of so many is detailed until it is known what that costs."""
EVALUATIONS_EVERY = 64

# Odd constants whose multiples spread over 64 bits: Steele, Lea and Flood, "Fast splittable pseudorandom number
# generators", 2014, https://doi.org/10.1145/2660193.2660195.
GOLDEN_64 = 0x9E3779B97F4A7C15
SPREAD_64 = 0xBF58476D1CE4E5B9


class Detail:
    """Decide by a step's number.

    Args:
        setting: "auto" (the first ten steps, then one of each `every`), "all", "off", or n for every n-th.
    """

    def __init__(self, setting: str | int) -> None:
        self.always = setting in {"all", 1}
        self.steered = setting == "auto"
        """Whether somebody measures what detail costs and sets `every`."""
        self.every = setting if isinstance(setting, int) else {"auto": WHILE_MEASURING, "all": 1}.get(setting, 0)
        """0: none; of steps, and unless it is steered of evaluations too."""
        self._first = FIRST_STEPS if self.steered else 0
        self._asked = range(0)

    def ask(self, first: int, steps: int) -> None:
        """Record these steps too, whatever the setting."""
        last = max(first + steps, self._asked.stop if first in self._asked else 0)
        self._asked = range(first, last)

    def of_step(self, number: int) -> bool:
        """Tell whether the step with this number is detailed."""
        return number in self._asked or self._is_due(number, self.every)

    def of_evaluation(self, number: int) -> bool:
        """Tell whether the evaluation with this number is: nobody measures what that costs, so they stay rare."""
        return self._is_due(number, max(self.every, EVALUATIONS_EVERY) if self.steered else self.every)

    def reason(self, number: int) -> str:
        """Say why a detailed step is kept."""
        return "first" if number < self._first else "sampled"

    def _is_due(self, number: int, every: int) -> bool:
        if number < self._first or not every:
            return number < self._first
        return is_chosen(number, every) if self.steered else number % every == 0


def is_chosen(number: int, every: int) -> bool:
    """Tell whether a number is the one that is chosen of its block of `every`, a power of two.

    Where in the block it stands changes from block to block: what a program does every 8th or 100th step would
    otherwise come with detail always or never, and be taken for its cost. The same numbers are chosen on every rank,
    and what is chosen of a larger block is chosen of the smaller ones too: each takes that of one of its halves.
    """
    half = 1
    while half < every:
        block = number // (2 * half)
        takes_second = (block * GOLDEN_64 + half * SPREAD_64) >> 63 & 1
        if (number // half) % 2 != takes_second:
            return False
        half *= 2
    return True
