"""Trainings on models whose layers are split over ranks, by several schedules."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.optim import SGD

from fidelity.layer_subjects import SIDE
from fidelity.ranks import Built, RankTraining, numbers_of
from fidelity.subjects import loss_of

RANKS, MICROBATCHES = 2, 4


class Layers(nn.Module):
    """Some of the layers of a model, under the names that all of them have."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): _layer(number) for number in numbers})

    def forward(self, x: Tensor) -> Tensor:
        """Apply one layer after the other."""
        for layer in self.layers.values():
            x = layer(x)
        return x


def pipelines() -> Iterator[RankTraining]:
    """Yield all of them."""
    for single in (ScheduleGPipe, Schedule1F1B):
        yield partial(_trained, schedule=single, several=False)
    for interleaved in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble):
        yield partial(_trained, schedule=interleaved, several=True)
    yield partial(_trained, schedule=ScheduleZBVZeroBubble, several=True, stages_of=lambda rank: [rank, 3 - rank])


def _layer(number: int) -> nn.Module:
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh())


def _trained(
    rank: int,
    built: Built,
    *,
    schedule: Callable[..., Any],
    several: bool,
    stages_of: Callable[[int], list[int]] = lambda rank: [rank, rank + RANKS],
) -> tuple[list[Tensor], list[Tensor]]:
    numbers = stages_of(rank) if several else [rank]
    count = RANKS * len(numbers)
    parts = [Layers([number]) for number in numbers]
    built(Layers(range(count)))
    stages = [
        PipelineStage(part, number, count, torch.device("cpu")) for part, number in zip(parts, numbers, strict=True)
    ]
    run = schedule(stages if several else stages[0], MICROBATCHES, loss_fn=lambda output, _: loss_of(output))
    parameters = [parameter for part in parts for parameter in part.parameters()]
    optimizer = SGD(parameters, 1e-2, momentum=0.9)
    torch.manual_seed(0)
    losses: list[Tensor] = []
    for _ in range(3):
        batch, of_microbatches = torch.randn(2 * MICROBATCHES, SIDE), list[Tensor]()
        last = count - 1 in numbers
        run.step(*([batch] if 0 in numbers else []), **({"target": batch, "losses": of_microbatches} if last else {}))
        optimizer.step()
        losses.append(torch.stack(of_microbatches).sum() if last else torch.zeros(()))
        optimizer.zero_grad()
    return losses, [number for part in parts for number in numbers_of(part)]
