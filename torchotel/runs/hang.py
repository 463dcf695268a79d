"""Find the rank that is behind in a collective, from the readings of PyTorch's flight recorder in the run folders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from torchotel import _semconv as names
from torchotel._collectives import CodeLine, CollectiveReading, EnqueuedCollective, GroupReading
from torchotel._records import PROCESS_ENDED_TYPE
from torchotel.runs.rank_folders import host_of, open_ranks, rank_of, sibling_ranks, world_size
from torchotel.runs.reader import RecordLine, Run, RunError, open_run

NOT_RECORDED = (
    "PyTorch has recorded no collectives, so the ranks cannot be compared: with Gloo, use PyTorch 2.11 or later"
)
MAX_NAMED = 8
"""Ranks that a sentence names."""
_OUTSIDE_PROGRAM = ("torch/", "torchotel/")
"""Folders below `site-packages` whose lines are not those of the program."""


@dataclass(frozen=True)
class RankEvidence:
    """The run folder of a rank, and its last readings."""

    rank: int
    host: str
    pid: int
    folder: Path
    world_size: int
    readings: Sequence[CollectiveReading]
    """The last two readings since the last step or evaluation ended; fewer if there are fewer."""
    reason: str
    """Why there are fewer than two readings; empty if there are two."""

    def group(self, name: str) -> GroupReading | None:
        """Return the last reading of a process group; None: the rank does not belong to the group."""
        last = self.readings[-1] if self.readings else None
        return next((group for group in last.groups if group.name == name), None) if last else None

    def has_moved(self, name: str) -> bool:
        """Return whether a number of a process group differs between both readings."""
        found = ({group.name: (group.enqueued, group.completed) for group in one.groups} for one in self.readings)
        return len({counts.get(name) for counts in found}) > 1

    def waits_in(self, name: str) -> EnqueuedCollective | None:
        """Return the oldest collective of a process group that is not finished; None: there is none."""
        group = self.group(name)
        return next((one for one in group.collectives if not one.finished), None) if group else None


class Hang(NamedTuple):
    """A process group in which the ranks have enqueued different numbers of collectives, or different operations."""

    group: str
    ranks: Sequence[RankEvidence]
    """The ranks of the group, in order."""
    behind: Sequence[RankEvidence]
    """The ranks that the others wait for; empty: there is no such rank."""
    sequence: int
    """Number of the first collective that the others wait in."""
    mismatch_sequence: int
    """Number of the first collective whose operation differs between ranks."""
    mismatch: Mapping[str, Sequence[int]]
    """The ranks by the operation of that collective; empty: the operations do not differ."""

    @property
    def operation(self) -> str:
        """The operation that the ranks that are behind have not enqueued; empty: unknown."""
        groups = (rank.group(self.group) for rank in self.ranks)
        known = (one for group in groups if group is not None for one in group.collectives)
        return next((one.operation for one in known if one.sequence == self.sequence), "")

    @property
    def suspects(self) -> Sequence[RankEvidence]:
        """The ranks that are behind, or if there are none, one rank for each of the different operations."""
        firsts = {ranks[0] for ranks in self.mismatch.values()}
        return self.behind or [rank for rank in self.ranks if rank.rank in firsts]


class Verdict(NamedTuple):
    """The hangs that the readings show, the cause of the others first, or the reasons for which there is none."""

    hangs: Sequence[Hang]
    reasons: Sequence[str]


def find_hang(ranks: Sequence[RankEvidence]) -> Verdict:
    """Compare the readings of all ranks: a hang is a difference between the ranks while no number moves.

    A rank that is behind does not wait in the group while others do. On Gloo the numbers include sends and receives,
    so the rank with the lowest number need not be the one.
    """
    missing = [f"rank {rank.rank} has no evidence: {rank.reason}" for rank in ranks if rank.reason]
    known, size = {rank.rank for rank in ranks}, max(rank.world_size for rank in ranks)
    absent = list(islice((rank for rank in range(size) if rank not in known), MAX_NAMED))
    if absent:
        more = max(0, size - len(known) - len(absent))
        missing.append(f"there is no run folder of {named(absent, more)}")
    if missing:
        return Verdict((), missing)
    if not any(group.enqueued for rank in ranks for group in rank.readings[-1].groups):
        return Verdict((), [NOT_RECORDED])
    moved: list[str] = []
    unknown: list[str] = []
    hangs: list[Hang] = []
    groups = {group.name: group for rank in ranks for group in rank.readings[-1].groups}
    for name, group in groups.items():
        members = [rank for rank in ranks if rank.group(name) is not None]
        moving = [rank.rank for rank in members if rank.has_moved(name)]
        lacking = sorted(set(group.ranks) - {rank.rank for rank in members})
        if moving:
            moved.append(f"the numbers of group {name} have moved between the last two readings of {named(moving)}")
        elif lacking:  # the collectives of the group have left the recorder
            unknown.append(f"the number of group {name} is unknown on {named(lacking)}")
        elif (hang := _compare(name, members)) is not None:
            hangs.append(hang)
    if moved:  # a rank that moves may be the cause of all other waits
        return Verdict((), moved)
    if hangs:
        return Verdict(sorted(hangs, key=_is_consequence), ())
    return Verdict((), unknown or ["all ranks have enqueued the same collectives"])


def named(ranks: Sequence[int], more: int = 0) -> str:
    """Return ranks, and the number of those that are not listed, as text: "ranks 1, 3 and 5 more"."""
    more += len(ranks[MAX_NAMED:])
    text = f"rank{'s' if len(ranks) + more > 1 else ''} {', '.join(map(str, ranks[:MAX_NAMED]))}"
    return f"{text} and {more:,} more" if more else text


def _compare(name: str, members: Sequence[RankEvidence]) -> Hang | None:
    enqueued = {rank.rank: group.enqueued for rank in members if (group := rank.group(name)) is not None}
    waiting = [one.sequence for rank in members if (one := rank.waits_in(name)) is not None]
    absent = [rank for rank in members if rank.waits_in(name) is None] if waiting else []
    lowest = min([enqueued[rank.rank] for rank in absent], default=0)
    behind = [rank for rank in absent if enqueued[rank.rank] == lowest]
    sequence, mismatch = _mismatch(name, members)
    if not behind and not mismatch:
        return None
    return Hang(name, members, behind, min(waiting, default=lowest + 1), sequence, mismatch)


def _mismatch(name: str, members: Sequence[RankEvidence]) -> tuple[int, Mapping[str, Sequence[int]]]:
    """Return the first number that a rank waits in and whose operations differ, and the ranks by operation."""
    operations: dict[int, dict[str, list[int]]] = {}
    unfinished: set[int] = set()
    for rank in members:
        group = rank.group(name)
        for one in group.collectives if group is not None else ():
            operations.setdefault(one.sequence, {}).setdefault(one.operation, []).append(rank.rank)
            unfinished |= set() if one.finished else {one.sequence}
    differing = [sequence for sequence in unfinished if len(operations[sequence]) > 1]
    return (min(differing), operations[min(differing)]) if differing else (0, {})


def _is_consequence(hang: Hang) -> bool:
    """Return whether each rank that is behind waits in another group, so that another hang is the cause."""
    return bool(hang.behind) and all(
        any(group.name != hang.group and rank.waits_in(group.name) for group in rank.readings[-1].groups)
        for rank in hang.behind
    )


def source_of(frames: Sequence[CodeLine]) -> CodeLine | None:
    """Return the innermost line of the program in a stack; of PyTorch, if there is none; None: the stack is empty."""
    return next((frame for frame in frames if not frame.file.startswith(_OUTSIDE_PROGRAM)), next(iter(frames), None))


def read_evidence(folders: Iterable[Path]) -> list[RankEvidence]:
    """Read what the ranks of one run recorded, in the order of the ranks.

    Args:
        folders: Folders of ranks, or the name of a run; folders of other ranks beside these are found.

    Raises:
        RunError: There is no run in a folder, or the folders are of several runs.
    """
    found: set[Path] = set()
    for run in (run for folder in folders for run in open_ranks(folder)):
        if run.folder.resolve() not in found:
            found.update(path.resolve() for path in sibling_ranks(run.folder))
    runs = [open_run(path) for path in sorted(found)]
    launches = {(str(run.info.get("run_id")), _resource_int(run, names.RUN_GENERATION, 0)) for run in runs}
    if len(launches) > 1:
        listed = ", ".join(sorted(run_id for run_id, _ in launches))
        raise RunError(f"the folders are of several runs ({listed}); name folders of one run")
    return [_evidence(rank_of(run), run) for run in sorted(runs, key=rank_of)]


def _resource_int(run: Run, name: str, default: int) -> int:
    value = run.info.get("resource", {}).get(name, default)
    return value if isinstance(value, int) else default


class _LastRecords(NamedTuple):
    """The last records of a run."""

    ended: RecordLine | None
    """The last step or evaluation that ended without an error."""
    failed: RecordLine | None
    """The step or evaluation after it that ended with an error or with the process."""
    stalled: RecordLine | None
    """The stall after it."""


def _evidence(rank: int, run: Run) -> RankEvidence:
    last = _last_records(run)
    end_ns = 0 if last.ended is None else _end_ns(last.ended)
    readings = [reading for reading in run.readings() if reading.unix_ns > end_ns][-2:]
    return RankEvidence(
        rank,
        host_of(run),
        _resource_int(run, "process.pid", 0),
        run.folder,
        world_size(run),
        readings,
        "" if len(readings) > 1 else _reason(run, last, has_reading=bool(readings)),
    )


def _last_records(run: Run) -> _LastRecords:
    ended: RecordLine | None = None
    failed: RecordLine | None = None
    stalled: RecordLine | None = None
    for record in run.records():
        if record.kind == "stall":
            stalled = record
        elif record.kind == "log":
            continue
        elif record.error_type is not None:
            failed = record
        elif ended is None or _end_ns(record) >= _end_ns(ended):
            ended, failed = record, None
    if ended is not None and stalled is not None and _end_ns(stalled) < _end_ns(ended):
        stalled = None
    return _LastRecords(ended, failed, stalled)


def _end_ns(record: RecordLine) -> int:
    return record.start_unix_ns + int(record.duration_s * 1e9)


def _reason(run: Run, last: _LastRecords, *, has_reading: bool) -> str:
    """Return why a rank has fewer than two readings since its last step or evaluation ended."""
    error = run.info.get("error") or {}
    if "type" in error:
        how = f"with {error['type']}: {error.get('message', '')}".removesuffix(": ")
        how = "without a shutdown, as after SIGKILL" if error["type"] == PROCESS_ENDED_TYPE else how
        return f"its run ended {how}"
    if last.failed is not None:
        text = f"its {last.failed.kind} {last.failed.number} ended with {last.failed.error_type}"
        return f"{text}: {last.failed.error_message or ''}".removesuffix(": ")
    if run.info.get("finished"):
        return "its run ended normally"
    if last.stalled is not None:
        text = f"it stalls in step or evaluation {last.stalled.number}, and Python did not answer"
        return f"{text}: {last.stalled.error_message or ''}".removesuffix(": ")
    if has_reading:
        return "it has one reading so far, and the second one follows at most 10 s after the first"
    after = "" if last.ended is None else f" since its {last.ended.kind} {last.ended.number} ended"
    why = "the rank trains, has not been quiet for the time of a stall yet, or has no process group"
    return f"the flight recorder was not read{after}, because {why}"
