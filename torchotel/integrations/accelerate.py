"""Accelerate knows of a step what the program gives to `Accelerator.log`, whether a tracker takes it or none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from torchotel.capture.torch_internals import Undo, replace
from torchotel.integrations.registry import publish


def connect(accelerator: ModuleType) -> Undo:
    """Hear what is logged from now on; return what ends that."""
    return replace(accelerator.Accelerator, "log", _heard)


def _heard(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def log(self: Any, values: Mapping[str, object], step: int | None = None, *args: Any, **kwargs: Any) -> Any:
        publish(lambda: {**values, **({} if step is None else {"global_step": step})})
        return original(self, values, step, *args, **kwargs)

    return log
