"""What a step without detail costs the training thread: CPU time of its own, in the smallest training there is.

A larger one leaves less of torchotel's code in the processor's caches, so there is one of those too.
Wall time would count what other programs of the machine do, and the worker's turns. Short blocks without an instrument
and with each take turns; a block counts with its median step.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from statistics import median
from time import thread_time_ns

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torchotel
from benchmarks import native, workloads
from benchmarks.modes import OFF
from benchmarks.parts import Conditions, Part, Table
from benchmarks.spread import spread

STEPS = 100
"""Of a block."""
_WARM_UP_STEPS = 10
_BATCH, _WIDTH = 16, 32

PAUSED = "torchotel, paused"
NO_LOADER, LOADER, AMID = "no loader", "with a DataLoader", "in a transformer"
CPU = "CPU µs a step"

Batches = Iterable[tuple[Tensor, Tensor]]
Train = Callable[[], list[int]]
"""Trains a block, and returns the CPU time of the thread after each step."""


def part() -> Part:
    """Train a tiny model with all hooks out."""
    return Part(
        "step",
        "A step without detail",
        "CPU time of the training thread alone, on top of the same step without torchotel, in the smallest training"
        " there is; a step with a DataLoader has one more phase, which what is in C++ does not see. In a transformer of"
        " two blocks, whose step takes some milliseconds, the same code comes from memory each time.",
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
    ways = _ways()
    for _ in range(conditions.rounds(15)):
        for way, train in ways.items():
            blocks = {name: _block(modes[name](), train) for name in order.sample([*modes], len(modes))}
            for name in list(modes)[1:]:
                times.setdefault(row_name(name, way), []).append(blocks[name] - blocks[""])
    conditions.sink.count()
    return {name: {CPU: spread(each)} for name, each in times.items()}


def _ways() -> Mapping[str, Train]:
    count = STEPS + _WARM_UP_STEPS
    inputs, targets = torch.ones(_BATCH, _WIDTH), torch.ones(_BATCH, 1)
    rows = TensorDataset(inputs.repeat(count, 1), targets.repeat(count, 1))
    workload = workloads.make("tiny")
    return {
        NO_LOADER: _training([(inputs, targets)] * count),
        LOADER: _training(DataLoader(rows, _BATCH)),
        AMID: lambda: [_after(workload.step) for _ in range(count)],
    }


def _training(batches: Batches) -> Train:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def train() -> list[int]:
        ends_ns = []
        for inputs, targets in batches:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            ends_ns.append(thread_time_ns())
        return ends_ns

    return train


def _after(step: Callable[[], None]) -> int:
    step()
    return thread_time_ns()


def _block(instrument: AbstractContextManager[object], train: Train) -> float:
    gc.collect()
    gc.disable()
    try:
        with instrument:
            ends_ns = train()
    finally:
        gc.enable()
    return median(after - before for before, after in pairwise(ends_ns[_WARM_UP_STEPS:])) / 1000


@contextmanager
def _hooks_out(endpoint: str, *, paused: bool) -> Iterator[None]:
    with torchotel.instrument(endpoint=endpoint, detail="off", prometheus_port=None) as handle:
        if paused:
            handle.pause()
        yield
