"""Trainings on models whose tensors are split over ranks, with the sequence or without."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.optim import SGD

from fidelity.ranks import Built, RankTraining, numbers_of
from fidelity.subjects import loss_of

WORDS, SIDE = 16, 8


class Words(nn.Module):
    """A small language model: an embedding, a block with two norms, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, SIDE)
        self.before, self.after = nn.LayerNorm(SIDE), nn.LayerNorm(SIDE)
        self.up, self.down = nn.Linear(SIDE, 2 * SIDE), nn.Linear(2 * SIDE, SIDE)
        self.head = nn.Linear(SIDE, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """Return the scores of the next words."""
        hidden = self.embedding(words)
        hidden = hidden + self.down(torch.relu(self.up(self.before(hidden))))
        scores: Tensor = self.head(self.after(hidden))
        return scores


def tensor_parallel() -> Iterator[RankTraining]:
    """Yield all of them."""
    yield partial(_trained, sequence=False)
    yield partial(_trained, sequence=True)


def split(model: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Split the tensors of `Words`, and between them the sequence, too."""
    between = Shard(1) if sequence else Replicate()
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "up": ColwiseParallel(input_layouts=between),
        "down": RowwiseParallel(output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    if sequence:
        plan |= {"before": SequenceParallel(), "after": SequenceParallel()}
    parallelize_module(model, mesh, plan)


def _trained(_: int, built: Built, *, sequence: bool) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    model = Words()
    split(model, init_device_mesh("cpu", (2,)), sequence=sequence)
    built(model)
    optimizer = SGD(model.parameters(), 1e-2, momentum=0.9)
    losses = []
    for _ in range(3):
        loss = loss_of(model(torch.randint(WORDS, (2, 4))))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        optimizer.zero_grad()
    return losses, numbers_of(model)
