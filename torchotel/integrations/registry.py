"""Connect to the training frameworks that the program imports, and pass on their values."""

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
    """Receives published values. A framework with an unknown interface is counted as a fault and publishes nothing.

    Args:
        offer: Receives values by name, for the current step.
    """

    def __init__(self, offer: Callable[[Mapping[str, object]], object]) -> None:
        self._offer = offer
        self.guard = Guard("frameworks", level=logging.DEBUG)  # DEBUG, since the user cannot correct such a fault

    def receive(self, read: Read) -> None:
        """Pass on the values that `read` returns; raises nothing."""
        if self.guard.is_off:
            return
        try:
            self._offer(read())
        except Exception:  # noqa: BLE001  # no exception of torchotel may reach the user's loop
            self.guard.fault()


_subscriber: Subscriber | None = None


def subscribe(subscriber: Subscriber) -> Callable[[], None]:
    """Make this the subscriber of all frameworks; return the function that removes it."""
    global _subscriber  # noqa: PLW0603  # the frameworks' callbacks have no reference to a session
    _subscriber = subscriber

    def undo() -> None:
        global _subscriber  # noqa: PLW0603  # removes what `subscribe` has set
        if _subscriber is subscriber:
            _subscriber = None

    return undo


def publish(read: Read) -> None:
    """Pass the values that `read` returns to the subscriber, if there is one; raises nothing."""
    if _subscriber is not None:
        _subscriber.receive(read)


def current_subscriber() -> Subscriber | None:
    """Return the current subscriber; None if torchotel is not running."""
    return _subscriber


ADAPTERS = {
    "transformers.trainer": "torchotel.integrations.transformers",
    "accelerate.accelerator": "torchotel.integrations.accelerate",
}
"""Adapters by the framework module that they connect to. Lightning calls torchotel's entry point instead."""


class Frameworks:
    """Connect the frameworks that the program imports, now or later.

    Args:
        offer: Receives values by name, for the current step.
    """

    def __init__(self, offer: Callable[[Mapping[str, object]], object]) -> None:
        self._subscriber = Subscriber(offer)
        self.guard = self._subscriber.guard
        self._undos = ExitStack()

    def install(self) -> None:
        """Subscribe, and connect each framework when the program imports it."""
        self._undos.callback(subscribe(self._subscriber))
        for name, adapter in ADAPTERS.items():
            self._undos.callback(after_import(name, self.guard.guarded(self._connector(adapter))))

    def uninstall(self) -> None:
        """Unsubscribe and disconnect the frameworks; callbacks of existing trainers stay, and publish nothing."""
        self._undos.close()

    def _connector(self, adapter: str) -> Callable[[ModuleType], None]:
        def connect(module: ModuleType) -> None:
            self._undos.callback(self.guard.guarded(import_module(adapter).connect(module)))

        return connect
