"""Layers that a module holds in a plain list or dict, where PyTorch does not know of them."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torchotel.capture.tree import class_of, modules_of, unwrapped, walk

_DEEPEST = 3
"""Lists in lists; a list can hold itself."""


def unregistered(model: torch.nn.Module) -> list[str]:
    """Name what holds layers that want to learn and that `parameters()` does not have.

    What needs no gradient is left out: a frozen teacher is hidden so on purpose.
    """
    known = {id(module) for module in modules_of(model)}
    root = class_of(unwrapped(model))
    return [
        f"{path or root}.{name}"
        for module, path, *_ in walk(model, "")
        for name, value in vars(module).items()
        if name != "_modules" and any(id(inner) not in known and _learns(inner) for inner in _held(value, _DEEPEST))
    ]


def _held(value: Any, levels: int) -> Iterator[torch.nn.Module]:
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple | set) else ()
    for inner in inside if levels else ():
        if isinstance(inner, torch.nn.Module):
            yield inner
        else:
            yield from _held(inner, levels - 1)


def _learns(module: torch.nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
