"""The learning rate that an optimizer steps with."""

from __future__ import annotations

import weakref

import torch

from torchotel._utils.faults import Guard
from torchotel.capture.readings import Reading, read_later

MAX_REST = 100
"""Steps without the leading optimizer, after which another optimizer leads."""


class LeadingOptimizer:
    """The optimizer of a thread whose learning rate is the step's, so that one series never mixes two optimizers.

    The first optimizer that steps leads. Another one leads once that is gone, or has not stepped for `MAX_REST` steps.
    """

    __slots__ = ("_optimizer", "_step")

    def __init__(self) -> None:
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._step = 0

    def steps(self, optimizer: torch.optim.Optimizer, step: int) -> bool:
        """Take in that an optimizer steps in the step of a number; return whether it leads."""
        leading = self._optimizer and self._optimizer()
        if leading is not optimizer:
            if leading is not None and step - self._step <= MAX_REST:
                return False
            self._optimizer = weakref.ref(optimizer)
        self._step = step
        return True


class LearningRates:
    """Ask optimizers; what one of the user's raises is counted here."""

    def __init__(self) -> None:
        self.guard = Guard("learning rates")

    def read(self, leading: LeadingOptimizer, optimizer: torch.optim.Optimizer, step: int) -> float | Reading | None:
        """Return the learning rate of an optimizer's first parameter group, if it leads. Raises nothing."""
        try:
            if self.guard.is_off or not leading.steps(optimizer, step):
                return None
            return learning_rate(optimizer)
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
