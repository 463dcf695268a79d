"""What frameworks tell, and who hears it in this process: their callbacks outlive a session, and are pickled."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from torchotel._guard import Guard

Read = Callable[[], Mapping[str, object]]


class Ear:
    """Hand on what is told; where a framework's interface is not what we know, that is counted, and nothing is heard.

    Args:
        offer: Gets values by name, for the step that is current.
    """

    def __init__(self, offer: Callable[[Mapping[str, object]], object]) -> None:
        self._offer = offer
        self.guard = Guard("frameworks", level=logging.DEBUG)  # nothing that the user could do

    def hear(self, read: Read) -> None:
        """Take in what `read` gives."""
        if self.guard.is_off:
            return
        try:
            self._offer(read())
        except Exception:  # noqa: BLE001  # nothing of ours may reach the user's loop
            self.guard.fault()


_ear: Ear | None = None


def listen(ear: Ear) -> Callable[[], None]:
    """Hear with this from now on; return what ends it."""
    global _ear  # noqa: PLW0603  # what frameworks call knows no session
    _ear = ear

    def undo() -> None:
        global _ear  # noqa: PLW0603  # see above
        if _ear is ear:
            _ear = None

    return undo


def tell(read: Read) -> None:
    """Hand on what `read` gives, if anybody hears it; raises nothing."""
    if _ear is not None:
        _ear.hear(read)


def ear() -> Ear | None:
    """Return who hears, if anybody does."""
    return _ear
