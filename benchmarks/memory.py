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
from typing import Any, NamedTuple

import torch

import torchotel
from benchmarks import workloads
from benchmarks.parts import Cell, Conditions, Part, Table
from torchotel._handle import Handle

MODULES = "150"
LOOKS = 4
UNUSED = "http://127.0.0.1:9"
"""No server listens here, so all buffers become full."""

NONE, DEFAULT, ALL, THREAD, FULL = (
    "no instrument",
    "torchotel, default settings",
    'torchotel, `detail="all"`',
    'torchotel, `detail="all"`, `worker="thread"`',
    'torchotel, `detail="all"`, endpoint unreachable',
)
PEAK, ABOVE, GROWTH = "peak, MiB", "above no instrument, MiB", "in the last half, MiB"
COMPANION = "peak of the companion, MiB"


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
    peaks_mb: dict[str, _Peaks] = {}
    for mode in modes:
        conditions.tell(f"{steps:,} steps: {mode}")
        peaks_mb[mode] = _train_elsewhere(mode, steps, conditions.sink.endpoint)
    conditions.sink.count()
    return {mode: _row(found, peaks_mb[NONE], steps) for mode, found in peaks_mb.items()}


class _Peaks(NamedTuple):
    training_mb: list[float]
    companion_mb: float


def _row(found: _Peaks, plain: _Peaks, steps: int) -> dict[str, Cell]:
    last_mb = found.training_mb[-1]
    return {
        "steps": steps,
        PEAK: last_mb,
        ABOVE: last_mb - plain.training_mb[-1],
        GROWTH: last_mb - found.training_mb[LOOKS // 2 - 1],
        COMPANION: found.companion_mb or "-",
    }


def _train_elsewhere(mode: str, steps: int, endpoint: str) -> _Peaks:
    command = [sys.executable, "-m", "benchmarks.memory", mode, str(steps), endpoint]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return _Peaks(*json.loads(done.stdout))


# ---- in the process


def main(mode: str, steps: int, endpoint: str) -> None:
    """Train, and print the peaks."""
    workload, peaks_mb, companion_mb = workloads.make(MODULES), [], 0.0
    with _MODES[mode](endpoint) as handle:
        for _ in range(LOOKS):
            for _ in range(steps // LOOKS):
                workload.step()
            peaks_mb.append(_peak_mb())
        if handle is not None and handle.session is not None and handle.session.companion_pid is not None:
            companion_mb = _peak_mb(str(handle.session.companion_pid))
    print(json.dumps(_Peaks(peaks_mb, companion_mb)))


def _peak_mb(pid: str = "self") -> float:
    status = Path(f"/proc/{pid}/status")
    if status.exists():  # on Linux getrusage includes the parent's memory
        (found,) = re.findall(r"VmHWM:\s*(\d+) kB", status.read_text())
        return int(found) / (1 << 10)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)  # bytes on macOS


def _ours(**settings: Any) -> Callable[[str], AbstractContextManager[Handle]]:
    return lambda endpoint: torchotel.instrument(**{"endpoint": endpoint, "prometheus_port": 0, **settings})


_MODES: dict[str, Callable[[str], AbstractContextManager[Handle | None]]] = {
    NONE: lambda _: nullcontext(),
    DEFAULT: _ours(),
    ALL: _ours(detail="all"),
    THREAD: _ours(detail="all", worker="thread"),
    FULL: _ours(detail="all", endpoint=UNUSED),
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("torchotel").setLevel(logging.CRITICAL)  # warnings about the unreachable endpoint
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
