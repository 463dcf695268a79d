"""Which steps are recorded in detail."""

FIRST_STEPS = 10
EVERY = 64


class Detail:
    """Decide by a step's number.

    Args:
        setting: "auto" (the first ten steps, then every 64th), "all", "off", or n for every n-th.
    """

    def __init__(self, setting: str | int) -> None:
        self.always = setting == "all"
        self._asked = range(0)
        self._first = FIRST_STEPS if setting == "auto" else 0
        self._every = {"auto": EVERY, "all": 1, "off": 0}.get(setting, 0) if isinstance(setting, str) else setting

    def ask(self, first: int, steps: int) -> None:
        """Record these steps too, whatever the setting."""
        last = max(first + steps, self._asked.stop if first in self._asked else 0)
        self._asked = range(first, last)

    def of_step(self, number: int) -> bool:
        """Tell whether the step with this number is detailed."""
        return number in self._asked or self.of(number)

    def of(self, number: int) -> bool:
        """Tell whether the evaluation with this number is detailed, and a step that nobody asked for."""
        return number < self._first or (self._every > 0 and number % self._every == 0)

    def reason(self, number: int) -> str:
        """Say why a detailed step is kept."""
        return "first" if number < self._first else "sampled"
