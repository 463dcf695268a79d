"""Targets of the benchmark and their verdicts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks import budget, load, memory, overhead, ranks, scrape, startup, step, wire, worker
from benchmarks.all_parts import RESNET, TRANSFORMER
from benchmarks.modes import ALL, DEFAULT, OFF, SPANS
from benchmarks.parts import Table, Tables, cell
from benchmarks.replay import SENT
from benchmarks.spread import FEWEST


class Target(NamedTuple):
    """A limit and the figure that it applies to."""

    what: str
    limit: float
    part: str
    row: str
    column: str
    upper: bool = False
    """Whether the limit applies to the upper bound of the figure."""
    at_least: bool = False
    """Whether the limit is a minimum."""
    beside: tuple[str, str] | None = None
    """Row and column of a figure of the machine alone. If it exceeds the limit, there is no verdict."""


class Reached(NamedTuple):
    """A target, its figure, and whether it is met."""

    target: Target
    figure: float | None
    """None if there is no figure."""
    met: bool | None
    """None if there is no verdict."""


BUDGET = budget.row_name(0.01)
STEP = step.row_name(OFF, step.NO_LOADER)
TARGETS = (
    Target("CPU time of a call in full detail, share of naive", 0.2, TRANSFORMER, ALL, overhead.SHARE_CPU),
    Target(
        "CPU time of a call in full detail without gradient norms, share of naive",
        0.2,
        TRANSFORMER,
        SPANS,
        overhead.SHARE_CPU,
    ),
    Target("step in full detail, x", 1.28, TRANSFORMER, ALL, overhead.STEP),
    Target("additional step time in full detail, share of naive", 0.14, TRANSFORMER, ALL, overhead.SHARE),
    Target(
        "additional step time in full detail without gradient norms, share of naive",
        0.14,
        TRANSFORMER,
        SPANS,
        overhead.SHARE,
    ),
    Target("step with default settings, x", 1.015, TRANSFORMER, DEFAULT, overhead.STEP),
    Target("step in full detail, x", 1.02, RESNET, ALL, overhead.STEP),
    Target("step with default settings, upper bound, x", 1.01, RESNET, DEFAULT, overhead.STEP, upper=True),
    Target("step without detail, CPU µs", 80, "step", STEP, step.CPU),
    Target("spans encoded and sent per second and core", 150_000, "worker", SENT, worker.RATE, at_least=True),
    Target("spans offered per second without a loss", 30_000, "load", load.OURS, load.OFFERED, at_least=True),
    Target("share of lost spans", 0, "load", load.OURS, load.LOST),
    Target("bytes per span at level 1, transformer", 23, "wire", TRANSFORMER, wire.level(1)),
    Target("bytes per span at level 6, transformer", 22, "wire", TRANSFORMER, wire.level(6)),
    Target("bytes per span at level 6, ResNet-18", 22, "wire", RESNET, wire.level(6)),
    Target("longest stall by the worker, ms", 0.75, "load", load.OURS, load.STALL, beside=(load.NO_SPANS, load.STALL)),
    Target("step of two ranks with default settings, x", 1.02, "ranks", ranks.DEFAULT, ranks.STEP),
    Target("hooks of a collective, CPU µs", 8, "ranks", ranks.DEFAULT, ranks.COLLECTIVE),
    Target("scrape of 500 layers, ms", 12, "scrape", scrape.ROW, scrape.TIME),
    Target(
        "longest delay by a scrape, ms", 0.5, "scrape", scrape.ROW, scrape.DELAY, beside=(scrape.ROW, scrape.NO_DELAY)
    ),
    Target("additional memory with full buffers, MiB", 64, "memory", memory.FULL, memory.ABOVE),
    Target("growth of memory in the last half, MiB", 2, "memory", memory.ALL, memory.GROWTH),
    Target("peak of the companion with full buffers, MiB", 60, "memory", memory.FULL, memory.COMPANION),
    Target("`instrument()`, ms", 400, "startup", startup.INSTRUMENT, startup.WALL),
    Target("`instrument()`, CPU ms of its thread", 400, "startup", startup.INSTRUMENT, startup.CPU),
    Target("`import torchotel`, ms", 5, "startup", startup.IMPORT, startup.WALL),
    Target("slower at a budget of 1 %, %", 1.5, "budget", BUDGET, budget.SLOWER),
    Target("overhead.ratio compared with the outside measurement, factor", 1.5, "budget", BUDGET, budget.FACTOR),
)


def reached(tables: Tables) -> Iterator[Reached]:
    """Compare the figures with each target; targets of parts that were not measured are left out."""
    for target in TARGETS:
        if target.part in tables:
            table = tables[target.part]
            if isinstance(table[target.row][target.column], str):
                yield Reached(target, None, None)
                continue
            figure = cell(table, target.row, target.column, upper=target.upper)
            met = figure >= target.limit if target.at_least else figure <= target.limit
            yield Reached(target, figure, None if _is_doubtful(target, table, met=met) else met)


def _is_doubtful(target: Target, table: Table, *, met: bool) -> bool:
    """Return whether the limit is inside the interval, there is no interval, or the machine alone exceeds the limit."""
    found = table[target.row][target.column]
    if isinstance(found, dict):
        between = not target.upper and found["low"] <= target.limit <= found["high"]
        if between or found["count"] < FEWEST:
            return True
    return not met and target.beside is not None and cell(table, *target.beside) > target.limit
