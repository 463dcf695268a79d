"""A net whose modules' names are looked at, and how they show."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from support.captured_records import Handed
from support.recorded_training import Run, Seen
from torchotel._records import StepRecord
from torchotel.capture.recorder import Capture
from torchotel.sampling.detail import Detail


class Net(nn.Module):
    """A body of two layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.body(x))
        return output


NET = ("Net", [("body", ["body.0", "body.1"]), "head"])
"""How its calls show."""


def backward_of(net: nn.Module) -> None:
    net(torch.randn(3, 4)).sum().backward()


def tree(span: Seen) -> Any:
    """Give the paths of the module spans below a span: a path, or (path, [inner])."""
    inner = [tree(child) for child in span.children]
    path = span.attributes["torch.module.path"]
    return (path, inner) if inner else path


def trees(run: Run) -> list[tuple[str, Any]]:
    """Give model and tree of each outermost call, in the order of the calls."""
    phases = [span for root in run.roots for span in root.walk() if span.name == "torch.forward"]
    return [(call.attributes["torch.model"], tree(call)) for phase in phases for call in phase.children]


@contextmanager
def captured() -> Iterator[Capture]:
    """Capture the block in detail, and look at what is remembered meanwhile."""
    handed = Handed()
    capture = Capture(handed.append, Detail("all"))
    capture.install()
    try:
        yield capture
    finally:
        capture.uninstall()
        capture.end()
    assert capture.guard.faults == 0
    assert sum(len(unit.calls) for unit in cast("list[StepRecord]", handed.records)) > 0
