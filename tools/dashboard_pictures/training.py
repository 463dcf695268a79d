"""One rank of a training to draw: `training.py FOLDER [numeric] [silent] [nan] [slow]`, until FOLDER/end exists."""

import os
import sys
import time
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import torchotel

NAN_AFTER_S = 15
"""Seconds before the NaN, enough for finite values in the shortest range."""


class Samples(Dataset[Tensor]):
    """Samples that take time to load, which causes a data wait and leaves the processor to other processes."""

    def __init__(self, load_s: float) -> None:
        self._load_s = load_s

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self._load_s)
        return torch.rand(16, generator=torch.Generator().manual_seed(index))


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.projection = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Add attention, of a sequence of one, to the input."""
        normed = self.norm(x)[:, None]
        attended: Tensor = self.attention(normed, normed, normed)[0][:, 0]
        mixed: Tensor = x + self.projection(attended)
        return mixed


class Transformer(nn.Module):
    """Blocks with long names, and a watched tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*(Block() for _ in range(6)))
        self.classifier = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Encode and classify."""
        encoded: Tensor = self.encoder(x)
        torchotel.watch(encoded, "encoded")
        scores: Tensor = self.classifier(encoded)
        return scores


def layers(folder: Path, *, numeric: bool) -> nn.Module:
    """Build the model, in DDP if the run has several ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)) if numeric else Transformer()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size == 1:
        return model
    dist.init_process_group("gloo", init_method=(folder / "group").as_uri(), rank=rank, world_size=world_size)
    return DistributedDataParallel(model)


def main(folder: Path, *words: str) -> None:
    """Train epochs, each followed by a batch of evaluation."""
    model = layers(folder, numeric="numeric" in words)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    samples = Samples(0.02 if "slow" in words and os.environ["RANK"] == "2" else 0.01)
    start_s = time.monotonic()
    for epoch in count():
        for batch in DataLoader(samples, batch_size=8):
            broken = "nan" in words and time.monotonic() > start_s + NAN_AFTER_S
            loss = model(batch * (torch.nan if broken else 1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if "silent" not in words:
                torchotel.log(loss=loss, samples=len(batch), tokens=16 * len(batch), epoch=epoch, accuracy=0.5)
        # The ranks agree on the end: if one stopped a step earlier, the others would wait for its gradients.
        ended = torch.tensor(int((folder / "end").exists()))
        if dist.is_initialized():
            dist.all_reduce(ended)
        if ended:
            break
        with torch.no_grad():
            model(batch)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torchotel.instrument()
    main(Path(sys.argv[1]), *sys.argv[2:])
