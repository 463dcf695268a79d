"""Training loops that touch everything torchotel hooks, and give all that they compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from opentelemetry import trace
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as torch_optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import torchotel

STEPS = 12
"""More than the faults after which a part of torchotel switches itself off."""


@contextmanager
def hooks_of_others() -> Iterator[Counter[str]]:
    """Have another library's hooks come after ours in each of PyTorch's dictionaries; count their calls."""
    calls: Counter[str] = Counter()

    def count(name: str, *_: Any, **__: Any) -> None:
        calls[name] += 1

    handles = [
        nn_module.register_module_forward_pre_hook(partial(count, "pre")),
        nn_module.register_module_forward_hook(partial(count, "post"), always_call=True),
        nn_module.register_module_module_registration_hook(partial(count, "module")),
        nn_module.register_module_parameter_registration_hook(partial(count, "parameter")),
        nn_module.register_module_buffer_registration_hook(partial(count, "buffer")),
        torch_optimizer.register_optimizer_step_pre_hook(partial(count, "optimizer")),
        torch_optimizer.register_optimizer_step_post_hook(partial(count, "stepped")),
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


class Refusing(nn.Module):
    """Raises at every call."""

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("not today")


class NoMemory(torch.optim.SGD):
    """Raises at every step."""

    def step(self, closure: Any = None) -> Any:
        """Find no memory for its state."""
        raise torch.OutOfMemoryError("not today")


class Net(nn.Module):
    """A checkpointed block, a module that fails, a watched tensor, and registrations in `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.refuse = nn.Linear(4, 8), nn.Linear(8, 8), Refusing()
        self.c = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Any:
        """Ask for the current span too, as a database client would."""
        trace.get_current_span().get_span_context()
        x = checkpoint(self.b, torch.relu(self.a(x)), use_reentrant=False)
        torchotel.watch(x, "inner")
        try:
            self.refuse(x)
        except ValueError:
            self.register_buffer("seen", x.detach().sum())
        return self.c(x)


def train(steps: int = STEPS) -> list[Tensor]:
    """Train with a loader, a scaler, accumulation, an optimizer that fails, values, a growing model, and validation."""
    torch.manual_seed(7)
    with hooks_of_others() as calls:
        net = Net()
        data = DataLoader(TensorDataset(torch.randn(2 * steps, 4)), batch_size=2, shuffle=True)
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        found: list[Tensor] = []
        for number, (x,) in enumerate(data):
            for part in x.split(1):
                loss = net(part).square().mean()
                scaler.scale(loss).backward()
                found.append(loss.detach())
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            with suppress(torch.OutOfMemoryError):
                NoMemory(net.parameters(), 0.1).step()
            optimizer.zero_grad()
            torchotel.log(loss=loss, samples=len(x), late=number)
            net.a.register_module(f"new{number}", nn.Linear(2, 2))
            net.a.register_parameter(f"weight{number}", nn.Parameter(torch.ones(1)))
        with torchotel.step(epoch=1), torch.no_grad():
            found.append(net(torch.ones(2, 4)))
        with torch.no_grad():
            found.append(net(torch.ones(2, 4)))
    return [*found, *_state(net), torch.tensor([calls[name] for name in sorted(calls)])]


def train_compiled(steps: int = 4) -> list[Tensor]:
    """Train a compiled module, one with a compiled part, and export a third."""
    torch.manual_seed(7)
    torch._dynamo.reset()
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    net[0].compile(backend="eager")
    net[2].compile(backend="eager")
    last = nn.Linear(1, 1)
    whole = torch.compile(last, backend="eager")
    optimizer = torch.optim.SGD([*net.parameters(), *last.parameters()], 0.1)
    found: list[Tensor] = []
    for number in range(steps):
        loss = whole(net(torch.full((2, 4), float(number)))).sum()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    exported = torch.export.export(nn.Linear(4, 4), (torch.ones(1, 4),), strict=True)
    found.append(exported.module()(torch.ones(1, 4)).detach())
    return [*found, *_state(net)]


def _state(net: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in net.state_dict().values()]
