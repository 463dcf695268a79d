"""Trains on two ranks, of which one is slow: `slow_rank_program.py FOLDER`, one run for each of CASES."""

import os
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import torchotel

CASES = ("data", "between", "forward", "backward", "even")
"""What is slow on rank 1; in `even`, the ranks are slow in turns."""
STEPS = 45
DELAY_S = 0.03
"""Many times the rest of a step."""


class Samples(Dataset[Tensor]):
    """Samples that take their time on one rank."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.delay_s)
        return torch.full((4,), index / STEPS)


class SleepInBackward(torch.autograd.Function):
    """Return the input; the backward sleeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, delay_s: float) -> Tensor:
        ctx.delay_s = delay_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.delay_s)
        return gradient, None


class Slow(nn.Module):
    """A layer that sleeps in its forward or its backward."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        """Return the input after the sleep."""
        time.sleep(self.forward_s)
        result: Tensor = SleepInBackward.apply(x, self.backward_s)
        return result


def train(case: str) -> None:
    """Train one run, slow on this rank if the case says so."""
    rank = distributed.get_rank()
    delays_s = dict.fromkeys(CASES, 0.0) | ({case: DELAY_S} if rank == 1 else {})
    middle = Slow(delays_s["forward"], delays_s["backward"])
    model = nn.Sequential(OrderedDict(encoder=nn.Linear(4, 8), middle=middle, decoder=nn.Linear(8, 2)))
    trained = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Samples(delays_s["data"]), batch_size=1)
    for number, batch in enumerate(loader if case == "data" else torch.ones(STEPS, 1, 4)):
        time.sleep(DELAY_S if case == "even" and number % 2 == rank else delays_s["between"])
        trained(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    """Record one run for each case."""
    torch.manual_seed(0)
    store = f"file://{sys.argv[1]}-store"
    distributed.init_process_group("gloo", init_method=store, rank=int(os.environ["RANK"]), world_size=2)
    for case in CASES:
        with torchotel.instrument(
            record=Path(sys.argv[1]) / case, detail="all", prometheus_port=None, traces_exporter="none"
        ):
            train(case)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
