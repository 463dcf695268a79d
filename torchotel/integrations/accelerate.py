"""Publish the values that a program passes to Accelerate's `Accelerator.log`, with or without a tracker."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from torchotel.capture.torch_internals import Undo, replace
from torchotel.integrations.registry import publish


def connect(accelerator: ModuleType) -> Undo:
    """Wrap `Accelerator.log` of the module `accelerate.accelerator`; return the function that restores it."""
    return replace(accelerator.Accelerator, "log", _publishing)


def _publishing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def log(self: Any, values: Mapping[str, object], step: int | None = None, *args: Any, **kwargs: Any) -> Any:
        publish(lambda: {**values, **({} if step is None else {"global_step": step})})
        return original(self, values, step, *args, **kwargs)

    return log
