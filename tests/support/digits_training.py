"""A small net learns scikit-learn's digits: one step goes NaN, one raises in its backward, one is slow.

And one batch is refused, of which no step comes: its forward raises, and no backward follows.
"""

import time
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import torchotel

BATCH = 16
BATCHES = 76
NAN, SLOW, FAILED = 22, 67, 70
"""Numbers of batches and of their steps. After twenty steps without detail it is known which of those are slow."""
REFUSED = 73
"""Number of a batch. (The failed one has no optimizer step, so that the next is of the same step.)"""
TIMES_SLOWER = 4


class Looked(nn.Module):
    """Refuses pictures that are blank."""

    def forward(self, pictures: Tensor) -> Tensor:
        if not pictures.any():
            raise ValueError("nothing to be seen, größer als nichts")
        return pictures


class Net(nn.Module):
    """Two layers with names that the pages search for."""

    def __init__(self) -> None:
        super().__init__()
        self.looked = Looked()
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.fc = nn.Linear(4 * 6 * 6, 10)

    def forward(self, pictures: Tensor) -> Tensor:
        scores: Tensor = self.fc(self.conv1(self.looked(pictures)).relu().flatten(1))
        return scores


def batches(count: int, *, spoilt: bool) -> DataLoader[tuple[Tensor, ...]]:
    """Give batches, always the same ones."""
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    images = torch.tensor(digits.images[: count * BATCH], dtype=torch.float32)[:, None] / 16
    if spoilt:
        images[NAN * BATCH] = torch.nan
        images[REFUSED * BATCH : (REFUSED + 1) * BATCH] = 0
    return DataLoader(TensorDataset(images, torch.tensor(digits.target[: count * BATCH])), BATCH)


def train(count: int = 8) -> None:
    """Learn from some batches, none of which is special."""
    _train(batches(count, spoilt=False), special=False)


def train_all() -> None:
    """Learn from as many as there must be for each of the special ones."""
    _train(batches(BATCHES, spoilt=True), special=True)


def _train(loader: DataLoader[tuple[Tensor, ...]], *, special: bool) -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    longest_s, began_s = 0.0, time.monotonic()
    for number, (images, labels) in enumerate(loader):
        with suppress(ValueError, KeyError):
            optimizer.zero_grad()
            scores = net(images)
            torchotel.watch(scores, "scores")
            loss = cross_entropy(scores, labels)
            if special and number == SLOW:
                time.sleep(TIMES_SLOWER * longest_s)  # no synchronisation: it is time that is looked at
            if special and number == FAILED:
                scores.register_hook(_refuse)
            loss.backward()
            for parameter in net.parameters():
                assert parameter.grad is not None
                torch.nan_to_num_(parameter.grad)  # else all steps that follow would be NaN too
            optimizer.step()
            torchotel.log(loss=loss, samples=len(labels))
        longest_s, began_s = max(longest_s, time.monotonic() - began_s), time.monotonic()


def _refuse(gradient: Tensor) -> None:
    raise KeyError("gradient")
