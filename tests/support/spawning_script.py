"""A script with its one line at the top: every process that is spawned from it runs that line again."""

import sys

import torch
from torch import nn
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import spawn
from torch.utils.data import DataLoader

import torchotel
from support.computing_dataset import Computed

torchotel.instrument(endpoint=sys.argv[1], detail="all")


def train(_: int = 0, workers: int = 0) -> None:
    """Train two epochs of two steps; the workers stay for both."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    context = get_context("spawn") if workers else None
    stay = workers > 0
    loader = DataLoader(
        Computed(), batch_size=4, num_workers=workers, multiprocessing_context=context, persistent_workers=stay
    )
    for _ in range(2):
        for batch in loader:
            model(batch).sum().backward()
            optimizer.step()


if __name__ == "__main__":
    if sys.argv[2] == "loader":
        train(workers=2)
    else:
        spawn(train, nprocs=2)
