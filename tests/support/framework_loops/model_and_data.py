"""The training that all loops run: one model, the same rows, the same settings."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

EPOCHS, BATCHES, VALIDATION_BATCHES = 2, 4, 2
RATE = 0.1


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings of the training."""

    accumulate: int = 1
    bf16: bool = False
    clip: float = 0.5
    """Largest norm of gradients, for clipping."""


class Net(nn.Module):
    """A model that computes its own loss, like the models of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.body(x))
        return {"loss": nn.functional.cross_entropy(logits.float(), labels), "logits": logits}


def rows(batches: int) -> list[dict[str, Tensor]]:
    """Return two rows for each batch."""
    numbers = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(4, generator=numbers), "labels": torch.tensor(i % 2)} for i in range(2 * batches)]


def loader(batches: int) -> DataLoader[Any]:
    """Return a loader of the rows."""
    return DataLoader(cast("Dataset[Any]", rows(batches)), batch_size=2)
