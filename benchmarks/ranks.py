"""Two ranks with DistributedDataParallel: the cost of a step, and of the hooks of a collective."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns, thread_time_ns
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks import workloads
from benchmarks.parts import Conditions, Part, Table
from benchmarks.spread import ratio_of_means, spread
from torchotel._session import Session
from torchotel.config.config import Config

RANKS = 2
DEFAULT, DETAIL = "torchotel, default settings", 'torchotel, `detail="all"`'
STEP, COLLECTIVE = "ratio", "CPU µs per collective"
SETTINGS = {DEFAULT: "auto", DETAIL: "all"}
COLLECTIVES = 300


def part() -> Part:
    """Compare blocks of steps with and without torchotel, in turns, on two ranks that reduce gradients together."""
    return Part(
        "ranks",
        "Two ranks with DistributedDataParallel: the transformer, gloo",
        "Wall time of rank 0, in turns with blocks without torchotel. The CPU time is that of the training thread for"
        " an `all_reduce` of one element, less the time without torchotel.",
        _measure,
    )


def _measure(conditions: Conditions) -> Table:
    table: Table = {}
    for name, detail in SETTINGS.items():
        with tempfile.TemporaryDirectory() as folder:
            words = [sys.executable, "-m", "benchmarks.ranks", "--store", str(Path(folder) / "store")]
            words += [
                "--endpoint",
                conditions.sink.endpoint,
                "--rounds",
                str(conditions.rounds(12)),
                "--steps",
                "4" if conditions.quick else "40",
                "--detail",
                detail,
            ]
            ranks = [
                subprocess.Popen([*words, "--rank", str(rank)], stdout=subprocess.PIPE, text=True)
                for rank in range(RANKS)
            ]
            said = [rank.communicate()[0] for rank in ranks]
            assert not any(rank.returncode for rank in ranks)
        pairs, costs_us = json.loads(said[0])
        table[name] = {STEP: ratio_of_means(pairs), COLLECTIVE: spread(costs_us)}
    conditions.sink.count()
    return table


def _rank(
    rank: int, store: str, endpoint: str, rounds: int, steps: int, detail: str
) -> tuple[list[tuple[float, float]], list[float]]:
    """Run one rank; return pairs of times of blocks with and without torchotel, and the CPU µs of each collective."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    workload = workloads.make("transformer", wrap=DistributedDataParallel)
    settings: dict[str, Any] = {"endpoint": endpoint, "prometheus_port": 0, "detail": detail}
    session = Session(Config(**settings), None)
    session.pause()
    pairs: list[tuple[float, float]] = []
    costs_us: list[float] = []
    for _ in range(rounds):
        without_ns = _time_ns(workload.step, steps)
        without_cpu_ns = _reduce_cpu_ns()
        session.resume()
        workload.step()  # the groups have hooks from now on
        pairs.append((_time_ns(workload.step, steps), without_ns))
        costs_us.append((_reduce_cpu_ns() - without_cpu_ns) / COLLECTIVES / 1e3)
        session.pause()
    session.stop(10.0)
    dist.destroy_process_group()
    return pairs, costs_us


def _time_ns(step: Callable[[], None], steps: int) -> int:
    dist.barrier()
    start_ns = perf_counter_ns()
    for _ in range(steps):
        step()
    return perf_counter_ns() - start_ns


def _reduce_cpu_ns() -> int:
    """Return the CPU time of the calling thread for some collectives."""
    tensor = torch.ones(1)
    start_ns = thread_time_ns()
    for _ in range(COLLECTIVES):
        dist.all_reduce(tensor)
    return thread_time_ns() - start_ns


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    kinds = {"rank": int, "store": str, "endpoint": str, "rounds": int, "steps": int, "detail": str}
    for option, kind in kinds.items():
        parser.add_argument(f"--{option}", type=kind, required=True)
    print(json.dumps(_rank(**vars(parser.parse_args()))))
