"""Which steps are recorded in detail."""

FIRST_STEPS = 10
WHILE_MEASURING = 8
"""Every such step is detailed until it is known what that costs."""
EVALUATIONS_EVERY = 64


class Detail:
    """Decide by a step's number.

    Args:
        setting: "auto" (the first ten steps, then every `every`-th), "all", "off", or n for every n-th.
    """

    def __init__(self, setting: str | int) -> None:
        self.always = setting == "all"
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
        return number < self._first or (every > 0 and number % every == 0)
