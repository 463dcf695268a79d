"""What is trained while the instruments are compared: models with many short module calls, where overhead shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_pre_hook

MODELS = ("transformer", "resnet18", "tiny")
_TOKENS, _WIDTH, _HEADS = 256, 128, 4


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.projection = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, _HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.projection(mixed.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]  # a module call is Any


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.attention = _Attention()
        self.mlp = nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]  # a module call is Any


class Transformer(nn.Module):
    """A small language model: ten module calls a block."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_TOKENS, _WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, _TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (batch, length, tokens)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]  # a module call is Any


class Workload(NamedTuple):
    """A model, and one step of its training."""

    name: str
    model: nn.Module
    step: Callable[[], None]
    calls: int
    """Module calls of a step."""


def make(name: str) -> Workload:
    """Build one of `MODELS` and what a step of it needs; the numbers are always the same."""
    torch.manual_seed(0)
    if name == "resnet18":
        model, inputs, targets = _resnet()
    else:
        model = Transformer(2 if name == "tiny" else 12)
        inputs, targets = torch.randint(_TOKENS, (4, 32)), torch.randint(_TOKENS, (4 * 32,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        output = model(inputs)
        functional.cross_entropy(output.flatten(0, -2), targets).backward()
        optimizer.step()

    return Workload(name, model, step, _count_calls(step))


def _resnet() -> tuple[nn.Module, Tensor, Tensor]:
    from torchvision.models import resnet18  # noqa: PLC0415  # an extra, and slow to import

    model: nn.Module = resnet18(num_classes=10)
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False  # the naive way's full backward hooks make an in-place one raise
    return model, torch.randn(2, 3, 32, 32), torch.randint(10, (2,))


def _count_calls(step: Callable[[], None]) -> int:
    calls = 0

    def count(_: nn.Module, __: object) -> None:
        nonlocal calls
        calls += 1

    handle = register_module_forward_pre_hook(count)
    step()
    handle.remove()
    return calls
