"""Read PyTorch's flight recorder, which records the collectives of each process group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

from torch import distributed

from torchotel._collectives import CollectiveReading, EnqueuedCollective, GroupReading
from torchotel._utils.stacks import MAX_PART, code_line, thread_stacks
from torchotel._utils.text import shortened
from torchotel.capture.torch_internals import flight_recorders, group_name, process_groups

MAX_GROUPS: Final = 32
MAX_COLLECTIVES: Final = 4
"""Collectives of a group that are not finished, and as many of the last ones."""
MAX_RANKS: Final = 1024
"""Ranks of a group that are listed; of a larger group, none are."""
MAX_CALL_FRAMES: Final = 8
"""Frames of the call of a collective."""


class _Group(NamedTuple):
    """A process group that this process belongs to."""

    name: str
    description: str
    ranks: tuple[int, ...]
    """Ranks of the world."""
    backends: frozenset[str]
    """For example `gloo` and `nccl`."""


def read_collectives(*, with_places: bool) -> CollectiveReading | None:
    """Read the flight recorder on any thread; `quiet_s` of the reading is 0.

    The first reading with the lines of collectives takes seconds, most of them without the GIL, since PyTorch loads
    symbols.

    Args:
        with_places: Whether file, line and function of collectives and threads are read.

    Returns:
        The reading; None if this process has no process group, or this PyTorch has no flight recorder.
    """
    infos = [_describe(group) for group in process_groups()]
    groups: list[GroupReading] = []
    for backend, dump in flight_recorders() if infos else ():
        ours = [info for info in infos if backend in info.backends]
        groups += _groups(_content(dump, with_places=with_places), ours, backend)
    if not groups:
        return None
    stacks = tuple(thread_stacks()) if with_places else ()
    return CollectiveReading(time.time_ns(), 0.0, tuple(groups[:MAX_GROUPS]), stacks)


def _describe(group: Any) -> _Group:
    backends = str(distributed.get_backend_config(group)).split(",")  # for example "cpu:gloo,cuda:nccl"
    return _Group(
        str(group.group_name),
        shortened(group_name(group), MAX_PART),
        tuple(distributed.get_process_group_ranks(group)),
        frozenset(backend.rpartition(":")[2] for backend in backends),
    )


def _content(dump: Callable[..., Mapping[str, Any]], *, with_places: bool) -> Mapping[str, Any]:
    content = dump(with_stacks=False)
    if with_places and not all(map(_is_finished, content["entries"])):
        return dump(with_stacks=True)
    return content


def _groups(content: Mapping[str, Any], infos: Iterable[_Group], backend: str) -> Iterator[GroupReading]:
    """Yield the groups of a recorder, whose status has numbers of this process alone; the entries have names, too."""
    entries: dict[str, list[Mapping[str, Any]]] = {}
    numbers: dict[str, str] = {}
    for entry in content["entries"]:
        numbers[entry["process_group"][0]] = number = str(entry["pg_id"])
        if not entry["is_p2p"]:
            entries.setdefault(number, []).append(entry)
    status = {str(number): counts for number, counts in content["pg_status"].items()}
    # The recorder keeps the last 2,000 collectives. A group with older ones only has a number without a name.
    is_complete = status.keys() <= set(numbers.values())
    for info in infos:
        name, ranks = _unique_name(info, backend), info.ranks if len(info.ranks) <= MAX_RANKS else ()
        number = numbers.get(info.name, "")
        if (counts := status.get(number)) is not None:
            enqueued, completed = (
                max(0, int(counts[f"last_{state}_collective"])) for state in ("enqueued", "completed")
            )
            collectives = _collectives(entries.get(number, ()))
            yield GroupReading(name, info.description, ranks, enqueued, completed, collectives)
        elif is_complete:
            yield GroupReading(name, info.description, ranks, 0, 0)


def _unique_name(info: _Group, backend: str) -> str:
    """Return the name of a group as in the log of PyTorch, with its description; with the backend if it has several."""
    name = info.name if info.description == info.name else f"{info.name}({info.description})"
    return shortened(name if len(info.backends) == 1 else f"{name} {backend}", MAX_PART)


def _collectives(entries: Sequence[Mapping[str, Any]]) -> tuple[EnqueuedCollective, ...]:
    waiting = islice((entry for entry in entries if not _is_finished(entry)), MAX_COLLECTIVES)
    shown = {entry["collective_seq_id"]: entry for entry in (*waiting, *entries[-MAX_COLLECTIVES:])}
    return tuple(_collective(shown[sequence]) for sequence in sorted(shown))


def _collective(entry: Mapping[str, Any]) -> EnqueuedCollective:
    is_finished, operation = _is_finished(entry), entry["profiling_name"].rpartition(":")[2]
    calls = () if is_finished else islice(entry.get("frames", ()), MAX_CALL_FRAMES)
    frames = tuple(code_line(one["filename"], one["line"], one["name"]) for one in calls)
    return EnqueuedCollective(entry["collective_seq_id"], shortened(operation, MAX_PART), is_finished, frames)


def _is_finished(entry: Mapping[str, Any]) -> bool:
    """Return whether a collective has ended; Gloo sets no state then."""
    return bool(entry["retired"]) or entry["state"] == "completed"
