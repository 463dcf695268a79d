"""Cost of each instrument: the steps of a workload with and without it, in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from benchmarks import workloads
from benchmarks.interleave import SHORTEST, Lengths, Mode, Pair, interleave
from benchmarks.modes import DEFAULT, NAIVE, modes
from benchmarks.parts import Cell, Conditions, Part, Table
from benchmarks.spread import ratio_of_medians, spread

STEP, STEP_CPU = "step, x", "CPU, x"
CALL, CALL_CPU = "µs per call", "CPU µs per call"
SHARE, SHARE_CPU = "share of naive", "share of naive CPU"
LOST = "lost"
SETTLING_STEPS = 100
NOTE = (
    "`x` is the ratio of a step with the instrument to a step without. A call is a module call, forward and backward"
    " together. The shares are relative to the additional cost of naive."
)


def part(workload: str, title: str, total_s: float, looks: Mapping[str, int] | None = None) -> Part:
    """Compare all modes on a workload for `total_s`; `looks` sets more blocks per round for some modes."""
    return Part(workload, title, NOTE, partial(_measure, workload, Lengths(0.5, 0.75, total_s, looks or {})))


def _measure(name: str, usual: Lengths, conditions: Conditions) -> Table:
    workload = workloads.make(name)
    lengths = SHORTEST if conditions.quick else usual._replace(total_s=usual.total_s * conditions.longer)
    with modes(workload, conditions.sink) as compared:
        if not conditions.quick:
            _settle(workload.step, next(mode for mode in compared if mode.name == DEFAULT))
        pairs = interleave(compared, workload.step, conditions.sink, lengths, conditions.tell)
    return {
        mode: {**row(measured, workload.calls), **_shares(measured, pairs[NAIVE])} for mode, measured in pairs.items()
    }


def _settle(step: Callable[[], None], mode: Mode) -> None:
    """Train until the cost of detail is known, because a run of some thousand steps is measured, not its beginning."""
    with mode.enter() as running:
        for _ in range(SETTLING_STEPS):
            step()
    running.drain()


def _wall(pair: Pair) -> float:
    return pair.with_it.wall_us - pair.without.wall_us


def _cpu(pair: Pair) -> float:
    return pair.with_it.cpu_us - pair.without.cpu_us


def row(pairs: Sequence[Pair], calls: int) -> dict[str, Cell]:
    """Return the cost of a mode per step and per call, and the outcome of its spans."""
    return {
        STEP: spread([pair.with_it.wall_us / pair.without.wall_us for pair in pairs]),
        STEP_CPU: spread([pair.with_it.cpu_us / pair.without.cpu_us for pair in pairs]),
        CALL: spread([_wall(pair) / calls for pair in pairs]),
        CALL_CPU: spread([_cpu(pair) / calls for pair in pairs]),
        **_sent(pairs),
    }


def _shares(pairs: Sequence[Pair], naive: Sequence[Pair]) -> dict[str, Cell]:
    return {
        name: ratio_of_medians([*map(above, pairs)], [*map(above, naive)])
        for name, above in ((SHARE, _wall), (SHARE_CPU, _cpu))
    }


def _sent(pairs: Sequence[Pair]) -> dict[str, Cell]:
    made = sum(pair.sent.made for pair in pairs)
    if not made:
        return {"spans/s": "-", "bytes per span": "-", LOST: "-"}
    arrived = sum(pair.sent.arrived for pair in pairs)
    return {
        "spans/s": made / sum(pair.sent.seconds for pair in pairs),
        "bytes per span": sum(pair.sent.wire_bytes for pair in pairs) / arrived if arrived else "-",
        LOST: f"{1 - arrived / made:.1%}",
    }
