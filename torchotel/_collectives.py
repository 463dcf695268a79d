"""Readings of PyTorch's flight recorder: the collectives that each process group of a rank has enqueued."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

READING_KIND = "collectives"
"""The kind of the line of a reading in `metrics.jsonl`."""


class CodeLine(NamedTuple):
    """A line of code on a stack."""

    file: str
    """Path below `site-packages`, or else the base name: a path may contain the name of a user."""
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class EnqueuedCollective(NamedTuple):
    """A collective that a rank has enqueued."""

    sequence: int
    """Number of the collective in its group, from 1; the same on all ranks of the group."""
    operation: str
    """Name of the operation, for example `all_reduce`."""
    finished: bool
    frames: tuple[CodeLine, ...] = ()
    """The stack of the call, the innermost frame first; empty: unknown, or the collective is finished."""


class GroupReading(NamedTuple):
    """The collectives of a process group, as one of its ranks sees them."""

    name: str
    """The same on all ranks of the group, and different from other groups."""
    description: str
    """Description of the group, or its number, as in `torch.collective.group`; several groups may have the same one."""
    ranks: tuple[int, ...]
    """Ranks of the world that belong to the group; empty: unknown."""
    enqueued: int
    """Number of the last collective that was enqueued; 0: there was none."""
    completed: int
    """Number of the last collective that was completed."""
    collectives: tuple[EnqueuedCollective, ...] = ()
    """The oldest that are not finished, and the last ones, in order."""


class ThreadStack(NamedTuple):
    """The Python stack of a thread."""

    thread: str
    """Name of the thread."""
    frames: tuple[CodeLine, ...]
    """The innermost frame first."""


class CollectiveReading(NamedTuple):
    """A reading of the flight recorder while no step ends."""

    unix_ns: int
    quiet_s: float
    """Seconds without an event of the training."""
    groups: tuple[GroupReading, ...]
    stacks: tuple[ThreadStack, ...] = ()


def encode_reading(reading: CollectiveReading) -> dict[str, Any]:
    """Return a reading as an object of JSON."""
    groups = (
        group._asdict() | {"collectives": [one._asdict() for one in group.collectives]} for group in reading.groups
    )
    stacks = (stack._asdict() for stack in reading.stacks)
    return {
        "kind": READING_KIND,
        "time_unix_nano": str(reading.unix_ns),
        "quiet_s": reading.quiet_s,
        "groups": list(groups),
        "stacks": list(stacks),
    }


def decode_reading(line: Mapping[str, Any]) -> CollectiveReading:
    """Return the reading of an object of JSON.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: `encode_reading` has not written the object.
    """
    return CollectiveReading(
        int(line["time_unix_nano"]),
        float(line["quiet_s"]),
        tuple(map(_group, line["groups"])),
        tuple(ThreadStack(str(stack["thread"]), _frames(stack["frames"])) for stack in line["stacks"]),
    )


def _group(group: Mapping[str, Any]) -> GroupReading:
    collectives = (
        EnqueuedCollective(int(one["sequence"]), str(one["operation"]), bool(one["finished"]), _frames(one["frames"]))
        for one in group["collectives"]
    )
    return GroupReading(
        str(group["name"]),
        str(group["description"]),
        tuple(map(int, group["ranks"])),
        int(group["enqueued"]),
        int(group["completed"]),
        tuple(collectives),
    )


def _frames(frames: Iterable[Any]) -> tuple[CodeLine, ...]:
    return tuple(CodeLine(str(file), int(line), str(function)) for file, line, function in frames)
