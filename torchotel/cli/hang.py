"""Find the rank that is behind if a distributed training hangs, from the run folders of its ranks.

Without RUN, the newest run in torchotel-runs/ is used. If the ranks ran on several hosts without a common file system,
name the run folder of each host.

While no step ends, each rank reads PyTorch's flight recorder: the number of the last collective that each process group
has enqueued. It is a hang if the numbers of the ranks differ, and none moves between two readings. A training that is
only slow is not a hang. The command names the rank that is behind, the collective that the other ranks wait in, with
its line of the program, and the Python stacks of the rank that is behind.

The exit code is 1 if there is a hang, 0 if the readings show none, and 2 if a run cannot be read.
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

from torchotel._collectives import EnqueuedCollective
from torchotel._utils.stacks import MAX_FRAMES, MAX_THREADS
from torchotel._utils.text import RED, Output, cut, duration
from torchotel.cli.summary import later_in_words, newest
from torchotel.cli.terminal import Terminal
from torchotel.runs.hang import Hang, RankEvidence, find_hang, named, read_evidence, source_of
from torchotel.runs.tables import table

MAX_RANKS = 64
"""Ranks of the table."""
MAX_STACKS = 4
"""Ranks whose stacks are printed."""
MAX_LINE = 300
"""Characters of a line, which may quote an exception."""
MAX_LINES = 64
"""Reasons for which no hang is found, and collectives that ranks wait in."""
MAX_HANGS = 4
"""Process groups that are shown."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run folders of the ranks of one run")


def call(arguments: argparse.Namespace) -> int:
    """Print the rank that is behind; return 1 if there is a hang."""
    ranks, output = read_evidence(arguments.runs or [newest()]), Terminal()
    verdict = find_hang(ranks)
    folders = [rank.folder for rank in ranks]
    later = [line for folder in arguments.runs for line in later_in_words(folder, folders)]
    if verdict.hangs:
        hangs = ["\n".join(_describe(hang, output)) for hang in verdict.hangs[:MAX_HANGS]]
        print("\n\n".join([*hangs, *later]))
        return 1
    print("no hang found:")
    waits = (f"rank {rank.rank} waits in {place}" for rank in ranks for place in _waits(rank))
    for line in islice(chain(verdict.reasons, waits, later), MAX_LINES):
        print(*output.wrap(f"  {cut(line, MAX_LINE)}", "    "), sep="\n")
    return 0


def _waits(rank: RankEvidence) -> Iterator[str]:
    for group in rank.readings[-1].groups if rank.readings else ():
        if (collective := rank.waits_in(group.name)) is not None:
            yield f"{_place(collective)}, group {group.name}"


def _place(collective: EnqueuedCollective) -> str:
    source = source_of(collective.frames)
    name = f"{collective.operation} {collective.sequence}"
    return name if source is None else f"{name} at {source}"


def _describe(hang: Hang, output: Output) -> Iterator[str]:
    for sentence in _sentences(hang):
        yield from output.wrap(output.colour(cut(sentence, MAX_LINE), RED))
    yield ""
    rows = [_row(hang, rank) for rank in hang.ranks[:MAX_RANKS]]
    yield table(("rank", "host", "waits in", "enqueued", "completed"), rows, left=3, output=output)
    if len(hang.ranks) > MAX_RANKS:
        yield f"and {len(hang.ranks) - MAX_RANKS:,} more"
    for rank in hang.suspects[:MAX_STACKS]:
        yield ""
        yield from _stacks(rank)
    if len(hang.suspects) > MAX_STACKS:
        yield f"\nThe stacks of {len(hang.suspects) - MAX_STACKS:,} more ranks are in their run folders."


def _sentences(hang: Hang) -> Iterator[str]:
    group = f"group {hang.group}"
    if hang.mismatch:
        operations = ", ".join(f"{named(ranks)} {operation}" for operation, ranks in hang.mismatch.items())
        yield f"The operations of collective {hang.mismatch_sequence} of {group} differ: {operations}."
    if hang.behind:
        behind = [rank.rank for rank in hang.behind]
        verb = "are" if len(behind) > 1 else "is"
        yield f"{named(behind).capitalize()} {verb} behind in {group}: {_missing(hang)} is not enqueued there."
    quiet_s = min(rank.readings[-1].quiet_s for rank in hang.ranks)
    yield f"No number of the group has moved between two readings, and no step has ended for {duration(quiet_s)}."


def _missing(hang: Hang) -> str:
    """Return the name of the collective that the ranks that are behind have not enqueued."""
    operation = hang.operation
    return f"{operation} {hang.sequence}" if operation else f"collective {hang.sequence}"


def _row(hang: Hang, rank: RankEvidence) -> Sequence[str]:
    group, collective = rank.group(hang.group), rank.waits_in(hang.group)
    counts = ("", "") if group is None else (f"{group.enqueued:,}", f"{group.completed:,}")
    return (str(rank.rank), rank.host, "" if collective is None else _place(collective), *counts)


def _stacks(rank: RankEvidence) -> Iterator[str]:
    """Yield the stacks of a rank, the innermost frame first."""
    yield cut(f"Rank {rank.rank} (host {rank.host}, process {rank.pid}), the innermost line first:", MAX_LINE)
    stacks = rank.readings[-1].stacks
    if not stacks:
        yield '  no stack: exception_text="type" leaves out places'
    for stack in stacks[:MAX_THREADS]:
        yield f"  {cut(stack.thread, MAX_LINE)}"
        yield from (f"    {cut(frame, MAX_LINE)}" for frame in stack.frames[:MAX_FRAMES])
