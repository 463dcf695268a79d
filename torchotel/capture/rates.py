"""The learning rate that an optimizer steps with."""

from __future__ import annotations

import torch

from torchotel._guard import Guard
from torchotel.capture.readings import Reading, read_later


class LearningRates:
    """Ask optimizers; what one of the user's raises is counted here."""

    def __init__(self) -> None:
        self.guard = Guard("learning rates")

    def read(self, optimizer: torch.optim.Optimizer) -> float | Reading | None:
        """Return the learning rate of the first parameter group; None where there is none. Raises nothing."""
        try:
            return None if self.guard.is_off else learning_rate(optimizer)
        except Exception:  # noqa: BLE001  # the step goes on without it
            self.guard.fault()
            return None


def learning_rate(optimizer: torch.optim.Optimizer) -> float | Reading | None:
    """Return the learning rate of an optimizer's first parameter group; None for one that has none."""
    rate = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
    if type(rate) is float:  # most are
        return rate
    if isinstance(rate, torch.Tensor):
        return read_later([rate]) if rate.numel() == 1 else None
    return float(rate) if isinstance(rate, int | float) else None
