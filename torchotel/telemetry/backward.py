"""From stamps of autograd nodes to the time that each module call's backward took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter, itemgetter

from torchotel._records import Error, ModuleCall, Phase, Slots, Stamp
from torchotel._utils.gil import Sliced

_start, _end = attrgetter("start_ns"), attrgetter("end_ns")


@dataclass(slots=True, eq=False)
class BackwardCall:
    """The backward of one module call in one run of the engine."""

    call: int
    """Index of the module call."""
    run: int
    """Index of the phase of the run; -1 where its bounds are unknown."""
    start_ns: int
    end_ns: int
    parent: BackwardCall | None = None
    """That of the nearest enclosing call which ran in the same graph task."""
    estimated: str | None = None
    error: Error | None = None
    task: int = -1
    """The engine's number of the run; that of a nested run is its own."""
    device_ns: int | None = None
    """By the clock of its device; None where that has none."""


@dataclass(slots=True, eq=False)
class Task:
    """The stamps of one graph task: the first and the last of each slot."""

    first: dict[int, int]
    last: dict[int, int]
    times: list[int]


def backward_calls(
    calls: Sequence[ModuleCall],
    parents: Sequence[int],
    phases: Sequence[Phase],
    stamps: Sequence[Stamp],
    sliced: Sliced,
) -> list[BackwardCall]:
    """Find the backward of every call in every run: parents first, siblings in the order that they ran.

    Args:
        calls: Children before parents.
        parents: Index of the enclosing call of each, -1 for none.
        phases: Those of the step; the backward ones bound the runs.
        stamps: In the order that they were written.
        sliced: Works through calls.
    """
    tasks = tasks_of(stamps)
    found: list[BackwardCall] = []
    for (number, task), candidates in zip(tasks.items(), _candidates(calls, list(tasks.values()), sliced), strict=True):
        run = _run_of(task, phases)
        spans = _time(calls, parents, candidates, task, phases[run] if run >= 0 else None, sliced)
        for span in sliced(spans):
            span.run, span.task = run, number
        found += spans
    return found


def earliest(times_ns: Mapping[int, int], slots: Slots) -> int | None:
    """Return the first of the times at these slots; None where there is none."""
    if isinstance(slots, int):
        return times_ns.get(slots)
    return min((times_ns[slot] for slot in slots if slot in times_ns), default=None)


def latest(times_ns: Mapping[int, int], slots: Slots) -> int | None:
    """Return the last of the times at these slots; None where there is none."""
    if isinstance(slots, int):
        return times_ns.get(slots)
    return max((times_ns[slot] for slot in slots if slot in times_ns), default=None)


def tasks_of(stamps: Sequence[Stamp]) -> dict[int, Task]:
    """Sort stamps by the graph task that they were written in."""
    tasks: dict[int, Task] = {}
    for number, run in groupby(stamps, key=itemgetter(2)):
        task = tasks.setdefault(number, Task({}, {}, []))
        slots, times_ns, _ = zip(*run, strict=True)
        task.first = dict(zip(reversed(slots), reversed(times_ns), strict=True)) | task.first
        task.last.update(zip(slots, times_ns, strict=True))
        task.times += times_ns
    return tasks


def _candidates(calls: Sequence[ModuleCall], tasks: Sequence[Task], sliced: Sliced) -> list[Sequence[int]]:
    """Find the calls that each task may have run through, in their order."""
    if len(tasks) == 1:  # nearly always
        return [range(len(calls))]
    users: dict[int, list[int]] = {}
    for index in sliced(range(len(calls))):
        call = calls[index]
        for slots in (call.starts, call.ends):
            for slot in (slots,) if isinstance(slots, int) else slots:
                users.setdefault(slot, []).append(index)
    return [sorted({index for slot in sliced(task.first) for index in users.get(slot, ())}) for task in tasks]


def _run_of(task: Task, phases: Sequence[Phase]) -> int:
    """Find the innermost run that holds all stamps of the task."""
    first, last, best = min(task.times), max(task.times), -1
    for index, phase in enumerate(phases):
        holds = phase.kind == "backward" and phase.start_ns <= first and last <= phase.end_ns
        if holds and (best < 0 or phase.start_ns >= phases[best].start_ns):
            best = index
    return best


def _time(
    calls: Sequence[ModuleCall],
    parents: Sequence[int],
    candidates: Sequence[int],
    task: Task,
    run: Phase | None,
    sliced: Sliced,
) -> list[BackwardCall]:
    """Time the calls that a task ran through; a container holds at least what its children took."""
    stamped: dict[int, tuple[int | None, int | None]] = {}
    first, last = task.first, task.last
    for index in sliced(candidates):
        _, _, _, starts, ends, _, _ = calls[index]
        start_ns = first.get(starts) if type(starts) is int else earliest(first, starts)
        end_ns = last.get(ends) if type(ends) is int else latest(last, ends)
        if start_ns is not None or end_ns is not None:
            stamped[index] = start_ns, end_ns
    spans: list[BackwardCall] = []
    children: dict[int, list[BackwardCall]] = {}
    for index in sliced(stamped):  # children first
        start_ns, end_ns = stamped[index]
        inner = children.pop(index, [])
        if start_ns is None or end_ns is None:
            span = _estimate(index, start_ns, end_ns, inner, task, run)
        else:
            span = BackwardCall(index, -1, start_ns, end_ns)
            if inner:
                span.start_ns, span.end_ns = min(start_ns, *map(_start, inner)), max(end_ns, *map(_end, inner))
        for child in sliced(inner):
            child.parent = span
        parent = parents[index]
        while parent >= 0 and parent not in stamped:
            parent = parents[parent]
        if parent >= 0:
            children.setdefault(parent, []).append(span)
        spans.append(span)
    spans.reverse()  # of those that start together the parent stays first
    spans.sort(key=_start)
    return spans


def _estimate(
    index: int, start_ns: int | None, end_ns: int | None, inner: Sequence[BackwardCall], task: Task, run: Phase | None
) -> BackwardCall:
    """Time a call that lacks its own start or end."""
    starts = [child.start_ns for child in inner] + ([] if start_ns is None else [start_ns])
    ends = [child.end_ns for child in inner] + ([] if end_ns is None else [end_ns])
    estimated = error = None
    if not starts:
        # An in-place operation took the output's node away: whatever ran before is the bound.
        starts = [max((t for t in task.times if t < ends[0]), default=ends[0])]
        estimated = "start"
    if run is not None and run.error is not None and end_ns is None:
        ends, error = [run.end_ns], run.error
    elif not ends:
        # Only part of the graph was asked for: whatever ran next is the bound.
        last = run.end_ns if run is not None else starts[0]
        ends = [min((t for t in task.times if t > starts[0]), default=last)]
        estimated = "end"
    return BackwardCall(index, -1, min(starts), max(ends), None, estimated, error)
