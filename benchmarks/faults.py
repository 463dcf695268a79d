"""Print the duration of a training step and of `shutdown` with good and bad endpoints.

Each row is a separate training, between two trainings with a good endpoint; the ratio compares the median steps.
Exports are frequent: every step is recorded in detail, and metrics are pushed ten times a second.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import NamedTuple

import torch

import torchotel
from benchmarks import workloads
from torchotel.worker.stats import Stats

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.endpoint_faults import FAULTS, Fault, faulty

SHUTDOWN_S = 2.0


class Figures(NamedTuple):
    """The figures of one run."""

    step_ns: float
    longest_ns: int
    shutdown_s: float
    stats: Stats
    warnings: int


class _Count(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.records += 1


@contextmanager
def _counted() -> Iterator[_Count]:
    logger, handler = logging.getLogger("torchotel"), _Count()
    logger.addHandler(handler)
    logger.propagate = False
    yield handler
    logger.removeHandler(handler)


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=workloads.WORKLOADS, default="tiny")
    parser.add_argument("--steps", type=int, default=300, help="steps of each run (default: %(default)s)")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    os.environ["OTEL_METRIC_EXPORT_INTERVAL"] = "100"
    workload = workloads.make(options.model)
    good = FAULTS[0]
    columns = "endpoint", "protocol", "median step, relative to a good endpoint", "longest step", "warnings", "arrived"
    print(f"| {' | '.join(columns)} | shutdown |")
    print("|---|---|---|---|---|---|---|")
    _run(workload, good, options.steps)  # a warm-up
    before = _run(workload, good, options.steps)
    for fault in FAULTS:
        bad = _run(workload, fault, options.steps)
        after = _run(workload, good, options.steps)
        _print(fault, bad, median((before.step_ns, after.step_ns)))
        before = after


def _run(workload: workloads.Workload, fault: Fault, steps: int) -> Figures:
    lengths_ns = []
    with faulty(fault) as endpoint, _counted() as warnings:
        handle = torchotel.instrument(
            endpoint=endpoint.url, protocol=fault.protocol, detail="all", metrics_exporter="otlp"
        )
        for number in range(steps):
            if number == steps // 2:
                endpoint.amid()
            start_ns = perf_counter_ns()
            workload.step()
            lengths_ns.append(perf_counter_ns() - start_ns)
        endpoint.after()
        start_s = time.monotonic()
        handle.shutdown(SHUTDOWN_S)
        lasted_s = time.monotonic() - start_s
        return Figures(median(lengths_ns), max(lengths_ns), lasted_s, handle.stats(), warnings.records)


def _print(fault: Fault, bad: Figures, good_ns: float) -> None:
    stats = bad.stats
    assert stats["spans_recorded"] == stats["spans_exported"] + stats["spans_dropped"]
    print(
        f"| {fault.name} | {fault.protocol} | x{bad.step_ns / good_ns:.3f} | {bad.longest_ns / 1e6:.0f} ms "
        f"| {bad.warnings} | {stats['spans_exported'] / stats['spans_recorded']:.0%} | {bad.shutdown_s:.2f} s |",
        flush=True,
    )


if __name__ == "__main__":
    main()
