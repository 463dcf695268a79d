"""One rank of a run that trains until a file says how it ends: `python rank_program.py FILE`."""

import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
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


def main() -> None:
    """Train, log and evaluate, epoch after epoch."""
    end = Path(sys.argv[1])
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while not end.exists():
        for batch in DataLoader(Slow(), batch_size=4):
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torchotel.log(loss=loss, samples=4, tokens=16, accuracy=0.5)
        with torch.no_grad():
            model(torch.ones(4, 4))
    if end.read_text() == "raise":
        raise RuntimeError("an error in mid-run")


torchotel.instrument()
main()
