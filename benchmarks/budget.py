"""Does `detail="auto"` stay within its budget with short steps, and is `overhead.ratio` correct?"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from random import Random
from statistics import fmean, median
from time import perf_counter_ns, process_time_ns

from benchmarks import workloads
from benchmarks.modes import FLUSH_S, paused_session, resumed
from benchmarks.parts import Cell, Conditions, Part, Table
from benchmarks.spread import Spread, percent, ratio_of_means
from torchotel.sampling.detail import FIRST_STEPS
from torchotel.worker.stats import Stats

MODULES = "150"
BUDGETS = (0.002, 0.01, 0.05)
STEPS, BLOCK_STEPS = 2000, 50
INTERRUPTED = 10
"""Steps longer than this multiple of the median were interrupted by another program and are cut to it."""
SLOWER, SLOWER_CPU = "slower, %", "more CPU, %"
DETAIL, DETAIL_CPU, SAID = "detail, %", "CPU of detail, %", "overhead.ratio, %"
FACTOR = "difference, factor"


def part() -> Part:
    """Train with several budgets, with detail off and without torchotel, in turns."""
    return Part(
        "budget",
        "The budget",
        "A model of 150 modules with short steps: 2,000 steps with each budget, including the first ten, which are"
        " always in detail. *Slower* and *more CPU* compare with no instrument. *Detail* is the cost of detail after"
        ' the first ten steps, measured from outside, compared with `detail="off"`. `overhead.ratio` is the figure'
        " that torchotel reports. A dash means that the measured cost may be zero.",
        _measure,
    )


def row_name(budget: float) -> str:
    """Return the name of the row of a budget."""
    return f"{budget:.1%}"


@dataclass
class _Lane:
    """A training with one instrument, a block at a time."""

    enter: Callable[[], AbstractContextManager[object]]
    wall_ns: list[int] = field(default_factory=list)
    """Wall time of each step."""
    cpu_ns: list[int] = field(default_factory=list)
    """CPU time of all threads for each step."""

    def train(self, step: Callable[[], None]) -> None:
        gc.collect()
        with self.enter():
            for _ in range(BLOCK_STEPS):
                start_ns, start_cpu_ns = perf_counter_ns(), process_time_ns()
                step()
                self.wall_ns.append(perf_counter_ns() - start_ns)
                self.cpu_ns.append(process_time_ns() - start_cpu_ns)


def _measure(conditions: Conditions) -> Table:
    workload = workloads.make("tiny" if conditions.quick else MODULES)
    budgets = BUDGETS[1:2] if conditions.quick else BUDGETS
    return {row_name(budget): _train(workload, budget, conditions) for budget in budgets}


def _train(workload: workloads.Workload, budget: float, conditions: Conditions) -> dict[str, Cell]:
    with (
        paused_session(conditions.sink, detail="off") as plain,
        paused_session(conditions.sink, overhead_budget=budget) as session,
    ):
        nothing, off, auto = _Lane(nullcontext), _Lane(lambda: resumed(plain)), _Lane(lambda: resumed(session))
        order = Random(0)
        for block in range(rounds := 1 if conditions.quick else STEPS // BLOCK_STEPS):
            conditions.tell(f"a budget of {row_name(budget)}: {block / rounds:.0%}")
            for lane in order.sample((nothing, off, auto), 3):
                lane.train(workload.step)
        session.flush(FLUSH_S)
        stats = session.stats()
    conditions.sink.count()
    return {"steps in detail, %": 100 * stats["steps_detailed"] / stats["steps"], **_row(nothing, off, auto, stats)}


def _row(nothing: _Lane, off: _Lane, auto: _Lane, stats: Stats) -> dict[str, Cell]:
    # overhead_ratio leaves out the first steps, which are a warm-up.
    detail, said = _longer(auto.wall_ns, off.wall_ns, FIRST_STEPS), 100 * (stats["overhead_ratio"] or 0.0)
    return {
        SLOWER: _longer(auto.wall_ns, nothing.wall_ns),
        SLOWER_CPU: _longer(auto.cpu_ns, nothing.cpu_ns),
        DETAIL: detail,
        DETAIL_CPU: _longer(auto.cpu_ns, off.cpu_ns, FIRST_STEPS),
        SAID: said,
        FACTOR: _factor(detail, said),
    }


def _factor(seen: Spread, said: float) -> Cell:
    """Return the factor between the measured and the reported cost; a dash if the measured cost may be zero."""
    if seen["low"] <= 0 or said <= 0:
        return "-"
    median_, low, high = (max(bound / said, said / bound) for bound in (seen["median"], seen["low"], seen["high"]))
    least = 1.0 if seen["low"] <= said <= seen["high"] else min(low, high)
    return Spread(median=median_, low=least, high=max(low, high), count=seen["count"])


def _longer(one: Sequence[int], other: Sequence[int], start: int = 0) -> Spread:
    """Return by how many percent the mean step of one lane is longer, from step `start` on."""
    return percent(ratio_of_means(list(zip(_means(one, start), _means(other, start), strict=True))))


def _means(lengths: Sequence[int], start: int) -> list[float]:
    """Return the mean step of each block."""
    limit = INTERRUPTED * median(lengths)
    blocks = (lengths[max(first, start) : first + BLOCK_STEPS] for first in range(0, len(lengths), BLOCK_STEPS))
    return [fmean(min(length, limit) for length in block) for block in blocks]
