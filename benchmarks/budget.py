"""Print what `detail="auto"` really costs under several budgets, beside what it says of itself.

Each budget trains for a while on its own; what its steps take on the whole is set against `detail="off"`, which runs
before and after it. On a machine that others use too, single percents of the whole are noise: the column that
the budget is held by compares steps that follow one another.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import fmean, median
from time import perf_counter_ns
from typing import Literal

import torch

import torchotel
from benchmarks import models
from benchmarks.sink import Sink
from torchotel._stats import Stats

BUDGETS = (0.002, 0.01, 0.05)


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=models.MODELS, default="transformer")
    parser.add_argument("--steps", type=int, default=500, help="of each run (default: %(default)s)")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    workload = models.make(options.model)
    print("| budget | detailed steps | overhead.ratio says | mean step against detail=off |\n|---|---|---|---|")
    with Sink() as sink:
        before = _run(workload, sink, options.steps, "off", 0.01)[0]
        for budget in BUDGETS:
            mean_ns, stats = _run(workload, sink, options.steps, "auto", budget)
            after = _run(workload, sink, options.steps, "off", 0.01)[0]
            share = stats["steps_detailed"] / stats["steps"]
            ratio = stats["overhead_ratio"]
            said = "-" if ratio is None else f"{ratio:.2%}"
            print(f"| {budget:.1%} | {share:.1%} | {said} | x{mean_ns / median((before, after)):.3f} |", flush=True)
            before = after


def _run(
    workload: models.Workload, sink: Sink, steps: int, detail: Literal["auto", "off"], budget: float
) -> tuple[float, Stats]:
    """Give the mean length of a step after the first tenth, and what the handle says of the whole run."""
    handle = torchotel.instrument(
        endpoint=sink.endpoint,
        detail=detail,
        overhead_budget=budget,
        metrics_exporter="none",
    )
    lengths_ns = []
    for _ in range(steps):
        start_ns = perf_counter_ns()
        workload.step()
        lengths_ns.append(perf_counter_ns() - start_ns)
    handle.shutdown()
    return fmean(lengths_ns[steps // 10 :]), handle.stats()


if __name__ == "__main__":
    main()
