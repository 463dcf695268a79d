"""Memory of a long training: the same training in a separate process for each instrument.

    python -m benchmarks.memory MODE STEPS ENDPOINT

is such a process. It prints its peak memory at several times.
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
"""No server listens here, so all buffers become full."""

NONE, DEFAULT, ALL, FULL = (
    "no instrument",
    "torchotel, default settings",
    'torchotel, `detail="all"`',
    'torchotel, `detail="all"`, endpoint unreachable',
)
PEAK, ABOVE, GROWTH = "peak, MiB", "above no instrument, MiB", "in the last half, MiB"


def part() -> Part:
    """Run the same training with each instrument."""
    return Part(
        "memory",
        "Memory",
        "Peak memory of a process that trains a model of 150 modules, and its growth in the last half of the steps."
        " `--memory-steps 100000` is the long form.",
        _measure,
    )


def _measure(conditions: Conditions) -> Table:
    steps = 40 if conditions.quick else conditions.memory_steps
    modes = [NONE] if conditions.quick else list(_MODES)  # each process imports torch again
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
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
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
    if status.exists():  # on Linux getrusage includes the parent's memory
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
    logging.getLogger("torchotel").setLevel(logging.CRITICAL)  # warnings about the unreachable endpoint
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
