"""One rank of a run that trains until a file says how it ends: `python rank_program.py FILE [STORE]`.

With the file of a store, the ranks add up their gradients, as long as all of them train.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader, Dataset

import torchotel


class Slow(Dataset[Tensor]):
    """Samples that take their time, so that there is a data wait and the machine is left to others."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.01)
        return torch.full((4,), index / 8)


class Model(nn.Module):
    """Two layers and a watched tensor between them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.encoder(x).relu()
        torchotel.watch(hidden, "hidden")
        decoded: Tensor = self.decoder(hidden)
        return decoded


def all_go_on(*, this_rank: bool) -> bool:
    """Return whether all ranks train on.

    If one rank ended alone, the other ranks would wait in their next collective.
    """
    going = torch.tensor(float(this_rank))
    distributed.all_reduce(going)
    return going.item() == distributed.get_world_size()


def add_up(model: nn.Module) -> None:
    """Add up the gradients of all ranks."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            distributed.all_reduce(parameter.grad)


def main() -> None:
    """Train, log and evaluate, epoch after epoch."""
    end = Path(sys.argv[1])
    together = len(sys.argv) > 2  # with a store
    if together:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        distributed.init_process_group("gloo", f"file://{sys.argv[2]}", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while True:
        ends = end.exists()
        together = together and all_go_on(this_rank=not ends)
        if ends:
            break
        for batch in DataLoader(Slow(), batch_size=4):
            loss = model(batch).square().mean()
            loss.backward()
            if together:
                add_up(model)
            optimizer.step()
            optimizer.zero_grad()
            torchotel.log(loss=loss, samples=4, tokens=16, accuracy=0.5)
        with torch.no_grad():
            model(torch.ones(4, 4))
    if end.read_text() == "raise":
        raise RuntimeError("an error in mid-run")


torchotel.instrument()
main()
