"""Which frameworks are heard, and how that begins and ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib import import_module
from types import ModuleType

from torchotel.capture.imports import after_import
from torchotel.frameworks.heard import Ear, listen

CONNECTED = {
    "transformers.trainer": "torchotel.frameworks.trainer_callback",
    "accelerate.accelerator": "torchotel.frameworks.accelerator_log",
}
"""Modules of frameworks, and ours that connect to them once they are imported; Lightning asks for its callback."""


class Frameworks:
    """Hear what the frameworks that the program imports know of its steps.

    Args:
        offer: Gets values by name, for the step that is current.
    """

    def __init__(self, offer: Callable[[Mapping[str, object]], object]) -> None:
        self._ear = Ear(offer)
        self.guard = self._ear.guard
        self._undos = ExitStack()

    def install(self) -> None:
        """Begin to listen."""
        self._undos.callback(listen(self._ear))
        for name, ours in CONNECTED.items():
            self._undos.callback(after_import(name, self.guard.guarded(self._connector(ours))))

    def uninstall(self) -> None:
        """Listen no more, and leave nothing in the frameworks but callbacks of trainers that are there."""
        self._undos.close()

    def _connector(self, ours: str) -> Callable[[ModuleType], None]:
        def connect(module: ModuleType) -> None:
            self._undos.callback(self.guard.guarded(import_module(ours).connect(module)))

        return connect
