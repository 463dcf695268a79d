"""What a step without detail costs the training thread: CPU time of its own, in the smallest training there is.

Wall time would count what other programs of the machine do, and the worker's turns. Short blocks without an instrument
and with each take turns; a block counts with its median step.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from statistics import median
from time import thread_time_ns

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torchotel
from benchmarks import native
from benchmarks.modes import OFF
from benchmarks.parts import Conditions, Part, Table
from benchmarks.spread import spread

STEPS = 100
"""Of a block."""
_WARM_UP_STEPS = 10
_BATCH, _WIDTH = 16, 32

PAUSED = "torchotel, paused"
NO_LOADER, LOADER = "no loader", "with a DataLoader"
CPU = "CPU µs a step"

Batches = Iterable[tuple[Tensor, Tensor]]
Train = Callable[[Batches], list[int]]
"""Trains, and returns the CPU time of the thread after each step."""


def part() -> Part:
    """Train a tiny model with all hooks out."""
    return Part(
        "step",
        "A step without detail",
        "CPU time of the training thread alone, on top of the same step without torchotel, in the smallest training"
        " there is. A step with a DataLoader has one more phase, which what is in C++ does not see.",
        _measure,
    )


def row_name(mode: str, way: str) -> str:
    """Name the row of an instrument and a way to train."""
    return f"{mode}, {way}"


def _measure(conditions: Conditions) -> Table:
    modes: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "": nullcontext,
        OFF: lambda: _hooks_out(conditions.sink.endpoint, paused=False),
        PAUSED: lambda: _hooks_out(conditions.sink.endpoint, paused=True),
    }
    hooks = native.load()
    if hooks is not None:
        modes[native.NAME] = lambda: native.on_steps(hooks)
    times: dict[str, list[float]] = {}
    order = random.Random(0)  # noqa: S311  # no secret
    train = _make_training()
    for _ in range(conditions.rounds(15)):
        for way, batches in _batches().items():
            blocks = {name: _block(modes[name](), train, batches) for name in order.sample([*modes], len(modes))}
            for name in list(modes)[1:]:
                times.setdefault(row_name(name, way), []).append(blocks[name] - blocks[""])
    conditions.sink.count()
    return {name: {CPU: spread(each)} for name, each in times.items()}


def _batches() -> dict[str, Batches]:
    count = STEPS + _WARM_UP_STEPS
    inputs, targets = torch.ones(_BATCH, _WIDTH), torch.ones(_BATCH, 1)
    rows = TensorDataset(inputs.repeat(count, 1), targets.repeat(count, 1))
    return {NO_LOADER: [(inputs, targets)] * count, LOADER: DataLoader(rows, _BATCH)}


def _make_training() -> Train:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def train(batches: Batches) -> list[int]:
        ends_ns = []
        for inputs, targets in batches:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            ends_ns.append(thread_time_ns())
        return ends_ns

    return train


def _block(instrument: AbstractContextManager[object], train: Train, batches: Batches) -> float:
    gc.collect()
    gc.disable()
    try:
        with instrument:
            ends_ns = train(batches)
    finally:
        gc.enable()
    return median(after - before for before, after in pairwise(ends_ns[_WARM_UP_STEPS:])) / 1000


@contextmanager
def _hooks_out(endpoint: str, *, paused: bool) -> Iterator[None]:
    with torchotel.instrument(endpoint=endpoint, detail="off", prometheus_port=None) as handle:
        if paused:
            handle.pause()
        yield
