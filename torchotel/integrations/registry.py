"""Connect to the training frameworks that the program imports."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib import import_module
from types import ModuleType

from torchotel._utils.faults import Guard
from torchotel._utils.imports import after_import

Read = Callable[[], Mapping[str, object]]


class Subscriber:
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


_subscriber: Subscriber | None = None


def subscribe(subscriber: Subscriber) -> Callable[[], None]:
    """Hear with this from now on; return what ends it."""
    global _subscriber  # noqa: PLW0603  # what frameworks call knows no session
    _subscriber = subscriber

    def undo() -> None:
        global _subscriber  # noqa: PLW0603  # see above
        if _subscriber is subscriber:
            _subscriber = None

    return undo


def publish(read: Read) -> None:
    """Hand on what `read` gives, if anybody hears it; raises nothing."""
    if _subscriber is not None:
        _subscriber.hear(read)


def subscriber() -> Subscriber | None:
    """Return who hears, if anybody does."""
    return _subscriber


CONNECTED = {
    "transformers.trainer": "torchotel.integrations.transformers",
    "accelerate.accelerator": "torchotel.integrations.accelerate",
}
"""Modules of frameworks, and ours that connect to them once they are imported; Lightning asks for its callback."""


class Frameworks:
    """Hear what the frameworks that the program imports know of its steps.

    Args:
        offer: Gets values by name, for the step that is current.
    """

    def __init__(self, offer: Callable[[Mapping[str, object]], object]) -> None:
        self._ear = Subscriber(offer)
        self.guard = self._ear.guard
        self._undos = ExitStack()

    def install(self) -> None:
        """Begin to listen."""
        self._undos.callback(subscribe(self._ear))
        for name, ours in CONNECTED.items():
            self._undos.callback(after_import(name, self.guard.guarded(self._connector(ours))))

    def uninstall(self) -> None:
        """Listen no more, and leave nothing in the frameworks but callbacks of trainers that are there."""
        self._undos.close()

    def _connector(self, ours: str) -> Callable[[ModuleType], None]:
        def connect(module: ModuleType) -> None:
            self._undos.callback(self.guard.guarded(import_module(ours).connect(module)))

        return connect
