"""Compare instruments in turns in one process, because two processes on shared cores differ more than they do.

Each block of steps with an instrument is between two blocks without one and is compared with their mean. Training runs
for some time before a block is measured, so that the background work of the instrument has started. Then the work that
the block leaves unfinished is balanced by the work that was unfinished before it.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import monotonic, perf_counter_ns, process_time_ns
from typing import NamedTuple

from benchmarks.sink import Sink

LEAST_STEPS = 2
"""Fewest steps of a block and before it, because the first step connects and names modules."""


@dataclass(frozen=True)
class Running:
    """Functions of an instrument that are called after a block, when it has been removed."""

    drain: Callable[[], object] = lambda: None
    """Exports the remaining spans."""
    made: Callable[[], int] = lambda: 0
    """Returns the number of spans of the block for the sink."""
    other_cpu_ns: Callable[[], int] = lambda: 0
    """Returns the CPU time of another process that works for the instrument."""


@dataclass(frozen=True)
class Mode:
    """An instrument that can be installed and removed repeatedly."""

    name: str
    enter: Callable[[], AbstractContextManager[Running]]


class Lengths(NamedTuple):
    """Durations of a measurement."""

    warm_s: float
    """Training before a block is measured."""
    block_s: float
    total_s: float
    """Duration of all rounds; the last round is completed, and there are at least two."""
    looks: Mapping[str, int] = {}
    """Blocks per round of a mode, if not one: a small cost needs more blocks to be visible."""


SHORTEST = Lengths(0, 0, 0)


class Block(NamedTuple):
    """Mean duration of a step."""

    wall_us: float
    cpu_us: float
    """CPU time of all threads of the process, and of the other process of the instrument."""


class Sent(NamedTuple):
    """Outcome of a mode's spans."""

    made: int
    arrived: int
    wire_bytes: int
    seconds: float
    """Time in which the spans were made."""


class Pair(NamedTuple):
    """A block with an instrument, the mean of the blocks before and after it, and the sent spans."""

    with_it: Block
    without: Block
    sent: Sent


NOTHING = Mode("no instrument", lambda: nullcontext(Running()))


def interleave(
    modes: Sequence[Mode], step: Callable[[], None], sink: Sink, lengths: Lengths, tell: Callable[[str], None]
) -> dict[str, list[Pair]]:
    """Run rounds of all modes in random order; return the blocks of each mode.

    Args:
        modes: The instruments to compare with none.
        step: Runs one training step.
        sink: Counts the sent spans.
        lengths: Durations of blocks and rounds.
        tell: Called with the progress before each block.
    """
    pairs: dict[str, list[Pair]] = {mode.name: [] for mode in modes}
    turns = [mode for mode in modes for _ in range(lengths.looks.get(mode.name, 1))]
    order, until_s, rounds = random.Random(0), monotonic() + lengths.total_s, 0
    sink.count()  # ignore earlier spans
    before, _ = _block(NOTHING, step, sink, lengths)
    while rounds < 2 or monotonic() < until_s:
        rounds += 1
        for mode in order.sample(turns, len(turns)):
            tell(f"round {rounds}, {max(0, until_s - monotonic()):.0f} s to go: {mode.name}")
            with_it, sent = _block(mode, step, sink, lengths)
            after, _ = _block(NOTHING, step, sink, lengths)
            without = Block((before.wall_us + after.wall_us) / 2, (before.cpu_us + after.cpu_us) / 2)
            pairs[mode.name].append(Pair(with_it, without, sent))
            before = after
    return pairs


def _block(mode: Mode, step: Callable[[], None], sink: Sink, lengths: Lengths) -> tuple[Block, Sent]:
    gc.collect()
    with mode.enter() as running:
        begin_s = monotonic()
        _steps(step, lengths.warm_s / 4 if mode is NOTHING else lengths.warm_s)
        wall_ns, cpu_ns = perf_counter_ns(), process_time_ns() + running.other_cpu_ns()
        count = _steps(step, lengths.block_s)
        wall_ns, cpu_ns = perf_counter_ns() - wall_ns, process_time_ns() + running.other_cpu_ns() - cpu_ns
        seconds = monotonic() - begin_s
    running.drain()
    sent = Sent(running.made(), *sink.count(), seconds)
    return Block(wall_ns / 1000 / count, cpu_ns / 1000 / count), sent


def _steps(step: Callable[[], None], seconds: float) -> int:
    count, until_s = 0, monotonic() + seconds
    while count < LEAST_STEPS or monotonic() < until_s:
        step()
        count += 1
    return count
