"""What Lightning finds as entry points when a Trainer is made: the callbacks that it is to call."""

from __future__ import annotations

from importlib import import_module

from torchotel.frameworks.heard import ear


def lightning() -> list[object]:
    """Give the callback for `lightning`; none where nobody hears it."""
    return _callbacks("torchotel.frameworks.lightning_callback")


def pytorch_lightning() -> list[object]:
    """Give the callback for `pytorch_lightning`; none where nobody hears it."""
    return _callbacks("torchotel.frameworks.pytorch_lightning_callback")


def _callbacks(name: str) -> list[object]:
    heard = ear()
    return [] if heard is None else heard.guard.guarded(lambda: [import_module(name).TorchotelCallback()])() or []
