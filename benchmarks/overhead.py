"""Print what each instrument costs a module call, all of them in one process and one run.

Blocks of steps with and without an instrument take turns, and the medians of such pairs count: on a machine that
others use too, two runs of the same program differ more than the instruments do. A block ends when all that it
recorded has been handed on, so the time of what the worker still had to do is in it: where steps go on for longer
than a block, more of that work hides behind them.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter_ns, process_time_ns
from typing import NamedTuple

import torch

from benchmarks import models, step, worker
from benchmarks.modes import Mode, Running, modes, no_instrument
from benchmarks.sink import Sink

WARM_UP_STEPS = 3
"""Not measured: torchotel names the modules, an exporter connects."""


class Block(NamedTuple):
    """What some steps took, by the step."""

    wall_us: float
    cpu_us: float
    """Of all threads of the process."""
    made: int
    """Spans that were meant for the sink, warm-up included."""


class Pair(NamedTuple):
    """A block with an instrument and the one without before or after it."""

    with_it: Block
    without: Block


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options = _parse(words)
    torch.set_num_threads(1)  # backward then runs on the thread that measures
    workload = models.make(options.model)
    with Sink() as sink:
        pairs, received = _interleave(modes(workload, sink), workload, sink, options.steps, options.rounds)
        behind = worker.measure(workload, options.rounds, f"{sink.endpoint}/v1/traces")
        off = step.measure(options.rounds, sink.endpoint)
    plain, packed = worker.request_bytes_per_span(workload)
    rows = {name: _row(measured, workload.calls, received.get(name)) for name, measured in pairs.items()}
    step_rows = {name: _spread(times) for name, times in off.items()}
    worker_rows = {name: _spread(times) for name, times in behind.items()}
    base_us = median(pair.without.wall_us for measured in pairs.values() for pair in measured)

    print(
        f"{workload.name}: {workload.calls} module calls and {base_us / 1000:.1f} ms a step without instruments; "
        f"{options.rounds} pairs of {options.steps} steps"
    )
    print(f"{_machine()}\n")
    _print_calls(rows)
    _print_spreads("a step of a tiny model, its thread alone", "CPU, µs", step_rows)
    _print_spreads("the worker alone", "µs a span", worker_rows)
    print(f"a span takes {plain:.0f} bytes of a request, {packed:.1f} compressed")
    if options.json is not None:
        result = {
            "model": workload.name,
            "calls": workload.calls,
            "steps": options.steps,
            "rounds": options.rounds,
            "machine": _machine(),
            "step_us": base_us,
            "modes": rows,
            "step_thread": step_rows,
            "worker": worker_rows,
            "request_bytes_per_span": {"plain": plain, "gzip": packed},
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=40, help="steps in a block (%(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="pairs of blocks of each instrument (%(default)s)")
    parser.add_argument("--model", choices=models.MODELS, default="transformer", help="what is trained (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="two rounds of two steps of the tiny model: does it run?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    options = parser.parse_args(words)
    if options.quick:
        options.steps, options.rounds, options.model = 2, 2, "tiny"
    if options.steps < 1 or options.rounds < 2:
        parser.error("takes at least 1 step and 2 rounds: one figure has no spread")
    return options


# ---- measuring


def _interleave(
    all_modes: Sequence[Mode], workload: models.Workload, sink: Sink, steps: int, rounds: int
) -> tuple[dict[str, list[Pair]], dict[str, float]]:
    """Run the rounds; return the pairs of each mode, and the share of its spans that came to the sink."""
    pairs: dict[str, list[Pair]] = {mode.name: [] for mode in all_modes}
    made: dict[str, int] = {mode.name: 0 for mode in all_modes if mode.sends}
    came = dict.fromkeys(made, 0)
    order = random.Random(0)  # noqa: S311  # no secret
    for _ in range(rounds):
        for mode in order.sample(all_modes, len(all_modes)):
            if order.random() < 0.5:
                without = _block(no_instrument(), workload, steps)
                with_it = _block(mode.enter(), workload, steps)
            else:
                with_it = _block(mode.enter(), workload, steps)
                without = _block(no_instrument(), workload, steps)
            pairs[mode.name].append(Pair(with_it, without))
            if mode.sends:
                made[mode.name] += with_it.made
                came[mode.name] += sink.count()
    return pairs, {name: came[name] / made[name] for name in made}


def _block(instrument: AbstractContextManager[Running], workload: models.Workload, steps: int) -> Block:
    step = workload.step
    gc.collect()
    gc.disable()
    try:
        with instrument as running:
            for _ in range(WARM_UP_STEPS):
                step()
            running.drain()
            wall_ns, cpu_ns = perf_counter_ns(), process_time_ns()
            for _ in range(steps):
                step()
            running.drain()
            wall_ns, cpu_ns = perf_counter_ns() - wall_ns, process_time_ns() - cpu_ns
        return Block(wall_ns / 1000 / steps, cpu_ns / 1000 / steps, running.made())
    finally:
        gc.enable()


# ---- figures


def _spread(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return {"median": middle, "low": low, "high": high}


def _row(pairs: Sequence[Pair], calls: int, delivered: float | None) -> dict[str, dict[str, float]]:
    row = {
        "wall_us_per_call": _spread([(pair.with_it.wall_us - pair.without.wall_us) / calls for pair in pairs]),
        "cpu_us_per_call": _spread([(pair.with_it.cpu_us - pair.without.cpu_us) / calls for pair in pairs]),
        "step_ratio": _spread([pair.with_it.wall_us / pair.without.wall_us for pair in pairs]),
    }
    return row if delivered is None else {**row, "delivered": {"share": delivered}}


def _print_calls(rows: dict[str, dict[str, dict[str, float]]]) -> None:
    print("above no instrument, medians of pairs, and between which half of them lie")
    print(f"{'':37}{'wall, µs a call':>30}{'CPU, µs a call':>30}{'step, x':>8}{'delivered':>11}")
    for name, row in rows.items():
        delivered = f"{row['delivered']['share']:.0%}" if "delivered" in row else ""
        wall, cpu = _cell(row["wall_us_per_call"]), _cell(row["cpu_us_per_call"])
        print(f"{name:37}{wall:>30}{cpu:>30}{row['step_ratio']['median']:>8.3f}{delivered:>11}")


def _print_spreads(title: str, unit: str, rows: dict[str, dict[str, float]]) -> None:
    print(f"\n{title:37} {unit:>29}")
    for name, spread in rows.items():
        print(f"{name:37}{_cell(spread):>30}")


def _cell(spread: dict[str, float]) -> str:
    return f"{spread['median']:.2f} ({spread['low']:.2f} … {spread['high']:.2f})"


def _machine() -> str:
    return (
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}, "
        f"{os.cpu_count()} CPUs, 1 torch thread"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
