"""Workloads of the comparison: a model and one step of its training."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_pre_hook

from benchmarks.models import CHAIN_WIDTH, VOCABULARY, Transformer, chain

Batch = tuple[nn.Module, Tensor, Tensor]
"""A model, its input and the target classes."""


class Workload(NamedTuple):
    """A model, and one step of its training."""

    name: str
    model: nn.Module
    step: Callable[[], None]
    calls: int
    """Module calls per step."""


def make(name: str, wrap: Callable[[nn.Module], nn.Module] = lambda model: model) -> Workload:
    """Build one of `WORKLOADS`, or, for a number, a chain of that many modules. The values are deterministic.

    Args:
        name: The name of the workload.
        wrap: Wraps the model, as for several ranks.
    """
    torch.manual_seed(0)
    model, inputs, targets = _chain(int(name)) if name.isdigit() else WORKLOADS[name]()
    model = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        output = model(inputs)
        functional.cross_entropy(output.flatten(0, -2), targets).backward()
        optimizer.step()

    return Workload(name, model, step, _count_calls(step))


def _transformer(blocks: int) -> Batch:
    return Transformer(blocks), torch.randint(VOCABULARY, (4, 32)), torch.randint(VOCABULARY, (4 * 32,))


def _resnet18() -> Batch:
    from torchvision.models import resnet18  # noqa: PLC0415  # an extra, and slow to import

    return resnet18(num_classes=10), torch.randn(8, 3, 64, 64), torch.randint(10, (8,))


def _vit() -> Batch:
    from torchvision.models import VisionTransformer  # noqa: PLC0415  # an extra, and slow to import

    model = VisionTransformer(
        image_size=32, patch_size=8, num_layers=6, num_heads=4, hidden_dim=64, mlp_dim=256, num_classes=10
    )
    return model, torch.randn(8, 3, 32, 32), torch.randint(10, (8,))


def _chain(modules: int) -> Batch:
    return chain(modules), torch.randn(4, CHAIN_WIDTH), torch.randint(CHAIN_WIDTH, (4,))


WORKLOADS: dict[str, Callable[[], Batch]] = {
    "transformer": lambda: _transformer(12),
    "resnet18": _resnet18,
    "vit": _vit,
    "tiny": lambda: _transformer(2),
}


def _count_calls(step: Callable[[], None]) -> int:
    calls = 0

    def count(_: nn.Module, __: object) -> None:
        nonlocal calls
        calls += 1

    handle = register_module_forward_pre_hook(count)
    step()
    handle.remove()
    return calls
