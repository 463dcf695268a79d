"""Training under a capture of its own, and its gradients in double precision."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from fidelity.norms import true_norm
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from support.captured_records import Handed
from torchotel._records import GradientNorms, Record, StepRecord
from torchotel.capture.recorder import Capture
from torchotel.sampling.detail import Detail

ROWS = torch.linspace(-1, 1, 20).reshape(5, 4)


class Recorded:
    """What a capture handed over."""

    def __init__(self) -> None:
        self.handed = Handed()

    @property
    def records(self) -> list[Record]:
        """Give all records."""
        return self.handed.records

    @property
    def steps(self) -> list[StepRecord]:
        """Give the training steps."""
        return [record for record in self.records if isinstance(record, StepRecord) and record.kind == "step"]

    @property
    def norms(self) -> list[GradientNorms | None]:
        """Give the gradient norms of each step."""
        return [step.gradients for step in self.steps]

    @property
    def paths(self) -> list[list[str]]:
        """Give the paths of the modules with norms, of each step."""
        return [[info.path for info, _ in norms.modules] if norms else [] for norms in self.norms]

    @property
    def totals(self) -> list[float]:
        """Give the norms over all parameters; every step must have one."""
        return [norms.total for norms in self.norms if norms is not None]


@contextmanager
def captured(
    *, gradient_norms: str | bool | int = True, detail: str | int = "off"
) -> Iterator[tuple[Recorded, Capture]]:
    """Record the block; nothing of ours may have failed."""
    recorded = Recorded()
    capture = Capture(recorded.handed.append, Detail(detail), gradient_norms=gradient_norms)
    capture.install()
    try:
        yield recorded, capture
    finally:
        capture.uninstall()
        capture.end()
    assert capture.guard.faults == capture.gradients.guard.faults == capture.watches.guard.faults == 0


class Operations(TorchDispatchMode):
    """Count the operations that a mode sees."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types for it
        self.seen: int = 0

    def __torch_dispatch__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return function(*args, **(kwargs or {}))


def gradient_norm(*models: nn.Module) -> float:
    """Give the norm of all gradients that models have."""
    parameters = {id(p): p for model in models for p in model.parameters()}
    return true_norm(p.grad for p in parameters.values())


def net(*, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Make two layers."""
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def loss_of(model: nn.Module) -> Tensor:
    """Give the loss of the rows that all tests train on."""
    return model(ROWS).square().sum()  # type: ignore[no-any-return]  # a module call is Any


def trained(
    model: nn.Module,
    *,
    steps: int = 3,
    loss: Callable[[nn.Module], Tensor] = lambda model: model(torch.randn(5, 4)).square().sum(),
) -> list[float]:
    """Train with SGD; give the true norm before each optimizer step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    true = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model).backward()
        true.append(gradient_norm(model))
        optimizer.step()
    return true
