"""Cost of a call in models of different sizes."""

from __future__ import annotations

from benchmarks import overhead, workloads
from benchmarks.interleave import SHORTEST, Lengths, Mode, interleave
from benchmarks.modes import ALL, OFF, paused_session, resumed
from benchmarks.parts import Cell, Conditions, Part, Table

MODULES = ("100", "1000", "10000")
COLUMNS = (overhead.STEP, overhead.CALL, overhead.CALL_CPU, overhead.LOST)


def part() -> Part:
    """Compare chains of 100 to 10,000 modules."""
    return Part(
        "growth",
        "Growth with the number of modules",
        "Chains of small modules. Without detail the cost of a step does not depend on the number of modules, so the"
        " cost per call falls.",
        _measure,
    )


def _measure(conditions: Conditions) -> Table:
    rows: Table = {}
    for modules in MODULES[:1] if conditions.quick else MODULES:
        for mode, row in _compare(modules, conditions).items():
            rows[f"{int(modules):,} modules, {mode}"] = {column: row[column] for column in COLUMNS}
    return rows


def _compare(modules: str, conditions: Conditions) -> dict[str, dict[str, Cell]]:
    workload = workloads.make(modules)
    lengths = SHORTEST if conditions.quick else Lengths(0.3, 0.5, 15)
    with (
        paused_session(conditions.sink, detail="off") as plain,
        paused_session(conditions.sink, detail="all", max_spans=None) as detailed,
    ):
        modes = [Mode(OFF, lambda: resumed(plain)), Mode(ALL, lambda: resumed(detailed))]
        pairs = interleave(modes, workload.step, conditions.sink, lengths, conditions.tell)
    return {mode: overhead.row(measured, workload.calls) for mode, measured in pairs.items()}
