"""Startup time: the import of torchotel, and `instrument()` after the import of torch, each in a new process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.parts import Cell, Conditions, Part, Table
from benchmarks.spread import spread

IMPORT, AFTER_TORCH, INSTRUMENT = (
    "`import torchotel`",
    "`import torchotel` after `import torch`",
    "`torchotel.instrument()`",
)
WALL, CPU, DYNAMO = "ms", "CPU ms of its thread", "imports Dynamo"

_TIMED = """
import sys, time
{before}
wall_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
{timed}
wall_ns, cpu_ns = time.perf_counter_ns() - wall_ns, time.thread_time_ns() - cpu_ns
import json
print(json.dumps([wall_ns / 1e6, cpu_ns / 1e6, "torch._dynamo" in sys.modules]))
"""
_PROGRAMS = {
    IMPORT: _TIMED.format(before="", timed="import torchotel"),
    AFTER_TORCH: _TIMED.format(before="import torch", timed="import torchotel"),
    INSTRUMENT: _TIMED.format(
        before="import torch, torchotel", timed="torchotel.instrument(endpoint=sys.argv[1], prometheus_port=0)"
    ),
}


def part() -> Part:
    """Time the import and `instrument()` in new processes."""
    return Part(
        "startup",
        "Startup",
        "Measured in new processes, with all files compiled and in the system's cache. torch is imported before"
        " `instrument()` is called. `instrument()` imports the libraries of the exporters before it returns.",
        _measure,
    )


def _measure(conditions: Conditions) -> Table:
    times = 1 if conditions.quick else 8  # the first of eight fills the system's cache
    endpoint = conditions.sink.endpoint
    return {name: _row([_run(program, endpoint) for _ in range(times)][-7:]) for name, program in _PROGRAMS.items()}


def _run(program: str, endpoint: str) -> tuple[float, float, bool]:
    command = [sys.executable, "-c", program, endpoint]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environ)
    wall_ms, cpu_ms, dynamo = json.loads(done.stdout)
    return wall_ms, cpu_ms, dynamo


def _row(runs: Sequence[tuple[float, float, bool]]) -> dict[str, Cell]:
    return {
        WALL: spread([wall_ms for wall_ms, _, _ in runs]),
        CPU: spread([cpu_ms for _, cpu_ms, _ in runs]),
        DYNAMO: "yes" if any(dynamo for _, _, dynamo in runs) else "no",
    }
