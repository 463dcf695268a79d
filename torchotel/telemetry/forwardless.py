"""Steps that run backward and call no module: their user may look for spans that nobody could take."""

from __future__ import annotations

from torchotel._records import Unit
from torchotel._warn import Warn

IN_A_ROW = 3
"""Steps after which it is told; the first may have begun before `instrument()`, or while another thread compiled."""

NO_FORWARD = (
    "steps run a backward and call no module: their forward is a function, perhaps a compiled one, or a `forward` that "
    "is called by its name. Call the model itself, and compile it rather than the function, to see its spans"
)


class Forwardless:
    """Look whether steps have a forward.

    Args:
        warn: Called where several in a row have none.
    """

    def __init__(self, warn: Warn) -> None:
        self._warn, self._in_a_row = warn, 0

    def look(self, step: Unit) -> None:
        """Take in a step."""
        kinds = {phase.kind for phase in step.phases}
        self._in_a_row = self._in_a_row + 1 if "backward" in kinds and "forward" not in kinds else 0
        if self._in_a_row == IN_A_ROW:
            self._warn(NO_FORWARD)
