"""One training step of any module, under `instrument()` and without."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from support.recorded_training import Run, Seen, recorded

PHASES_ONLY = ("torch.step", ["torch.forward", "torch.backward", "torch.optimizer.step"])


class Model(nn.Module):
    """Two linear layers `a` and `b`, others that are given, and a forward that is a function of model and inputs."""

    def __init__(self, run: Callable[..., Any], **others: nn.Module) -> None:
        super().__init__()
        self.run = run
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        for name, module in others.items():
            self.add_module(name, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Do what was given."""
        return self.run(self, *args, **kwargs)


def total(output: Any) -> Tensor:
    """Give the plainest loss: the sum of all tensors in a container."""
    if isinstance(output, Tensor):
        return output.sum()
    values = output.values() if isinstance(output, dict) else output
    return sum((total(value) for value in values), torch.zeros(()))


def train(
    model: nn.Module, *inputs: Any, loss: Callable[[Any], Tensor] = total, steps: int = 1, **keywords: Any
) -> list[Tensor]:
    """Train some steps with SGD; give the losses and what the model learnt."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(steps):
        value = loss(model(*inputs, **keywords))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.detach())
    return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]


def recorded_step(
    model: nn.Module, *inputs: Any, loss: Callable[[Any], Tensor] = total, detail: str = "all", **keywords: Any
) -> Seen:
    """Train one step and give it as the receiver saw it."""
    with recorded(detail) as run:
        train(model, *inputs, loss=loss, **keywords)
    return only_step(run)


def only_step(run: Run) -> Seen:
    """Give the step of a run that has one."""
    (step,) = run.steps
    return step


def step_tree(forward: list[Any], backward: list[Any]) -> Any:
    """Give the tree of a step: what stands below its forward, below its backward, and its optimizer's step."""
    below = ("torch.backward", backward) if backward else "torch.backward"
    return ("torch.step", [("torch.forward", forward), below, "torch.optimizer.step"])


def attributes(step: Seen, span: str, attribute: str) -> list[Any]:
    """Give one attribute of all spans of a name, in the order of their start; None where it is missing."""
    return [seen.attributes.get(f"torch.{attribute}") for seen in step.find_all(span)]
