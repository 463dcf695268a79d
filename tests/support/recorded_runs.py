"""Real small trainings, recorded, and what their pages are made from."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchotel
from torchotel.runs import open_run
from torchotel.runs.html import Content, gather
from torchotel.runs.html.advice import Advice, advise


def recorded(
    folder: Path, program: Callable[[], object], *, raises: type[BaseException] | None = None, **settings: Any
) -> Content:
    """Run a program with a recording, which ends with the exception that the program `raises`."""
    quiet = {"traces_exporter": "none", "metrics_exporter": "none"}
    with (
        pytest.raises(raises) if raises else nullcontext(),
        torchotel.instrument(record=folder / "run", **{**quiet, **settings}),
    ):
        program()
    return gather(open_run(folder / "run"))


def train(
    model: nn.Module,
    steps: int,
    *,
    lr: float = 0.01,
    batch: Callable[[int], torch.Tensor] = lambda _: torch.rand(4, 8),
    loss: Callable[[int, torch.Tensor], torch.Tensor] = lambda _, output: output.pow(2).mean(),
) -> None:
    """Train a model; `batch` makes the input of a step, and `loss` its loss of the output."""
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for step in range(steps):
        optimizer.zero_grad()
        made = loss(step, model(batch(step)))
        made.backward()
        optimizer.step()
        torchotel.log(loss=made)


def advice(content: Content, title: str) -> Advice | None:
    """Return the advice whose title contains a text."""
    return next((one for one in advise(content) if title in one.title), None)
