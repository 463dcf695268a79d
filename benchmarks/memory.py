"""What a long training keeps in memory: the same in a process of its own with each instrument.

    python -m benchmarks.memory MODE STEPS ENDPOINT

is such a process; it prints the most memory that it has had so far, at several times.
"""

from __future__ import annotations

import json
import logging
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

import torchotel
from benchmarks import workloads
from benchmarks.parts import Cell, Conditions, Part, Table

MODULES = "150"
LOOKS = 4
UNUSED = "http://127.0.0.1:9"
"""Where nobody listens: all buffers become full."""

NONE, DEFAULT, ALL, FULL = (
    "no instrument",
    "torchotel, as it comes",
    'torchotel, `detail="all"`',
    'torchotel, `detail="all"`, nobody listens',
)
PEAK, ABOVE, GROWTH = "peak, MiB", "above no instrument, MiB", "in the last half, MiB"


def part() -> Part:
    """Train the same for as many steps with each."""
    return Part(
        "memory",
        "Memory",
        "The most that a process has had, after training a model of 150 modules, and how much of that came in the last"
        " half of the steps. `--memory-steps 100000` is the long form.",
        _measure,
    )


def _measure(conditions: Conditions) -> Table:
    steps = 40 if conditions.quick else conditions.memory_steps
    modes = [NONE] if conditions.quick else list(_MODES)  # each takes its own import of torch
    peaks_mb: dict[str, list[float]] = {}
    for mode in modes:
        conditions.tell(f"{steps:,} steps: {mode}")
        peaks_mb[mode] = _train_elsewhere(mode, steps, conditions.sink.endpoint)
    conditions.sink.count()
    return {mode: _row(found, peaks_mb[NONE], steps) for mode, found in peaks_mb.items()}


def _row(found: list[float], plain: list[float], steps: int) -> dict[str, Cell]:
    return {
        "steps": steps,
        PEAK: found[-1],
        ABOVE: found[-1] - plain[-1],
        GROWTH: found[-1] - found[LOOKS // 2 - 1],
    }


def _train_elsewhere(mode: str, steps: int, endpoint: str) -> list[float]:
    command = [sys.executable, "-m", "benchmarks.memory", mode, str(steps), endpoint]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603  # ourselves
    found: list[float] = json.loads(done.stdout)
    return found


# ---- in the process


def main(mode: str, steps: int, endpoint: str) -> None:
    """Train, and print the peaks."""
    workload, peaks_mb = workloads.make(MODULES), []
    with _MODES[mode](endpoint):
        for _ in range(LOOKS):
            for _ in range(steps // LOOKS):
                workload.step()
            peaks_mb.append(_peak_mb())
    print(json.dumps(peaks_mb))


def _peak_mb() -> float:
    status = Path("/proc/self/status")
    if status.exists():  # what getrusage says there begins with the memory of the process that started this one
        (found,) = re.findall(r"VmHWM:\s*(\d+) kB", status.read_text())
        return int(found) / (1 << 10)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)  # bytes on macOS


def _ours(**settings: Any) -> Callable[[str], AbstractContextManager[object]]:
    return lambda endpoint: torchotel.instrument(**{"endpoint": endpoint, "prometheus_port": 0, **settings})


_MODES: dict[str, Callable[[str], AbstractContextManager[object]]] = {
    NONE: lambda _: nullcontext(),
    DEFAULT: _ours(),
    ALL: _ours(detail="all"),
    FULL: _ours(detail="all", endpoint=UNUSED),
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("torchotel").setLevel(logging.CRITICAL)  # where nobody listens it says so
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
