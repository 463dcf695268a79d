"""Cost of a step without detail: CPU time of the training thread, in a minimal training.

A transformer is measured too, because a larger model leaves less of torchotel's code in the processor's caches. Wall
time would include other programs and the worker. Short blocks with and without an instrument take turns, and the median
step of each block is used.
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
"""Steps of a block."""
_WARM_UP_STEPS = 10
_BATCH, _WIDTH = 16, 32

PAUSED = "torchotel, paused"
NO_LOADER, LOADER, IN_MODEL = "no loader", "with a DataLoader", "in a transformer"
CPU = "CPU µs per step"

Batches = Iterable[tuple[Tensor, Tensor]]
Train = Callable[[], list[int]]
"""Trains a block and returns the CPU time of the thread after each step."""


def part() -> Part:
    """Train a tiny model with the module hooks removed."""
    return Part(
        "step",
        "A step without detail",
        "Additional CPU time of the training thread, compared with the same step without torchotel, in a minimal"
        " training. A step with a DataLoader has one more phase, which the capture in C++ does not record. In a"
        " transformer of two blocks, whose step takes some milliseconds, the same code is loaded from memory each"
        " time.",
        _measure,
    )


def row_name(mode: str, way: str) -> str:
    """Return the name of the row of an instrument and a training."""
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
    order = random.Random(0)
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
        IN_MODEL: lambda: [_after(workload.step) for _ in range(count)],
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
