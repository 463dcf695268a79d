"""What is trained with and without torchotel: a model, its inputs, its loss."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

Loop = Callable[..., Iterator[tuple[Any, Tensor]]]
"""Trains a model with the inputs that follow it; after each backward it hands out what the model gave, and the loss."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One model and how it is trained; everything is made anew for each training, from the same seed."""

    name: str
    kind: str
    """Where it comes from, such as `torchvision classification`."""
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    """Positional and keyword arguments of one call."""
    device: str = "cpu"
    """`meta`: the graph is built and run through without numbers, for models that are too large."""
    steps: int = 2
    momentum: float = 0.9
    """Of SGD; 0 where gradients are sparse, which momentum can't take."""
    loop: Loop | None = None
    """How it is trained, where that is not plainly by SGD."""
    norms: bool | None = None
    """Whether norms are compared: those of the gradients that its steps leave. None: where it is trained plainly."""
    timed: bool = True
    """Whether times are compared, where it is trained plainly."""

    def make(self) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """Build the model and its inputs, the same each time."""
        torch.manual_seed(0)
        with torch.device(self.device):
            args, kwargs = self.inputs()
        return self.build().to(self.device).train(), args, kwargs  # not all can be built without numbers


def loss_of(output: Any) -> Tensor:
    """Make one number of all that a model gave out, such that every part has a gradient of its own."""
    parts = [part.float() for part in tensors(output) if part.requires_grad]
    return torch.stack([(part * _weights(part)).mean() for part in parts]).sum()


def _weights(part: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, part.numel(), device=part.device).view(part.shape)


def tensors(value: Any) -> Iterator[Tensor]:
    """Find the tensors of an output, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors(inner)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors(getattr(value, field.name))
