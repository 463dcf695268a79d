"""Modules that fail, once, and a training loop that goes on."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from support.recorded_training import Run, Seen, recorded
from support.single_step_training import Model

ROWS = torch.arange(8.0).reshape(2, 4) / 8
GOOD_FORWARD = ("forward Model", ["forward a", ("forward deep", ["forward deep.0"]), "forward b"])
GOOD_BACKWARD = ("backward Model", ["backward b", ("backward deep", ["backward deep.0"]), "backward a"])


class FailsOnce(nn.Module):
    """Raises at its first call."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error: BaseException | None = error

    def forward(self, x: Tensor) -> Tensor:
        error, self.error = self.error, None
        if error is not None:
            raise error
        return x * 2


def failing(inner: nn.Module) -> Model:
    return Model(lambda m, x: m.b(m.deep(m.a(x))), deep=nn.Sequential(inner))


def fail_then_train(model: nn.Module, detail: str, failure: type[BaseException]) -> Run:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with recorded(detail) as run:
        for error in (failure, None):
            with pytest.raises(error) if error else nullcontext():
                model(ROWS).sum().backward()
                optimizer.step()
    return run


def estimated(step: Seen) -> list[str]:
    assert {seen.attributes.get("torch.estimated") for seen in step.walk()} <= {None, "end"}
    return [seen.name for seen in step.walk() if "torch.estimated" in seen.attributes]
