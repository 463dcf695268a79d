"""Instruments in turns, in one process: on shared cores two processes, or two minutes, differ more than they do.

Each block of steps with an instrument stands between two without, and is compared with their mean. Steps go on for some
time before a block is measured, so that what an instrument does beside the training is under way, and what is left of
the block's own at its end is outweighed by what was left of before.
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
"""Of a block, and before it: the first step connects, and names modules."""


@dataclass(frozen=True)
class Running:
    """What is asked of an instrument when a block is over and it is out again."""

    drain: Callable[[], object] = lambda: None
    """Brings out what it still has."""
    made: Callable[[], int] = lambda: 0
    """Counts the spans of the block that were meant for the sink."""


@dataclass(frozen=True)
class Mode:
    """An instrument that can be put in and taken out again and again."""

    name: str
    enter: Callable[[], AbstractContextManager[Running]]


class Lengths(NamedTuple):
    """How long things go on."""

    warm_s: float
    """Before a block is measured."""
    block_s: float
    total_s: float
    """Of all rounds; the last one is finished, and there are two at least."""
    looks: Mapping[str, int] = {}
    """Blocks of a mode in a round, where that is not one: what costs next to nothing takes more of them to be seen."""


SHORTEST = Lengths(0, 0, 0)


class Block(NamedTuple):
    """What a step took."""

    wall_us: float
    cpu_us: float
    """Of all threads of the process."""


class Sent(NamedTuple):
    """What became of a mode's spans."""

    made: int
    arrived: int
    wire_bytes: int
    seconds: float
    """In which they were made."""


class Pair(NamedTuple):
    """A block with an instrument, the mean of those before and after it, and what was sent."""

    with_it: Block
    without: Block
    sent: Sent


NOTHING = Mode("no instrument", lambda: nullcontext(Running()))


def interleave(
    modes: Sequence[Mode], step: Callable[[], None], sink: Sink, lengths: Lengths, tell: Callable[[str], None]
) -> dict[str, list[Pair]]:
    """Run rounds of all modes in ever new order; return what each block took.

    Args:
        modes: What is compared with no instrument.
        step: Of the training.
        sink: Counts what is sent.
        lengths: Of blocks and rounds.
        tell: Called before each block with where that is.
    """
    pairs: dict[str, list[Pair]] = {mode.name: [] for mode in modes}
    turns = [mode for mode in modes for _ in range(lengths.looks.get(mode.name, 1))]
    order, until_s, rounds = random.Random(0), monotonic() + lengths.total_s, 0  # noqa: S311  # no secret
    sink.count()  # what was sent before counts for nobody
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
        wall_ns, cpu_ns = perf_counter_ns(), process_time_ns()
        count = _steps(step, lengths.block_s)
        wall_ns, cpu_ns = perf_counter_ns() - wall_ns, process_time_ns() - cpu_ns
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
