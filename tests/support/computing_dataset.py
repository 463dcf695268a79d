"""Samples that a module makes: forwards that run where batches are fetched, and are no training's."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Computed(Dataset[Tensor]):
    """Samples that a module makes."""

    def __init__(self) -> None:
        self.make = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        with torch.no_grad():
            made: Tensor = self.make(torch.full((4,), float(index)))
        return made
