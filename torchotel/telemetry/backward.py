"""From stamps of autograd nodes to the time that each module call's backward took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchotel._records import Error, ModuleCall, Phase, Slots, Stamp


@dataclass(slots=True)
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


@dataclass(slots=True)
class Task:
    """The stamps of one graph task: the first and the last of each slot."""

    first: dict[int, int]
    last: dict[int, int]
    times: list[int]


def backward_calls(
    calls: Sequence[ModuleCall], parents: Sequence[int], phases: Sequence[Phase], stamps: Sequence[Stamp]
) -> list[BackwardCall]:
    """Find the backward of every call in every run: parents first, siblings in the order that they ran.

    Args:
        calls: Children before parents.
        parents: Index of the enclosing call of each, -1 for none.
        phases: Those of the step; the backward ones bound the runs.
        stamps: In the order that they were written.
    """
    users: dict[int, list[int]] = {}
    for index, call in enumerate(calls):
        starts, ends = call.starts, call.ends
        if type(starts) is int and type(ends) is int:  # nearly all
            users.setdefault(starts, []).append(index)
            if ends != starts:
                users.setdefault(ends, []).append(index)
        else:
            for slot in {*each_slot(starts), *each_slot(ends)}:
                users.setdefault(slot, []).append(index)
    found: list[BackwardCall] = []
    for number, task in tasks_of(stamps).items():
        run = _run_of(task, phases)
        touched = sorted({index for slot in task.first for index in users.get(slot, ())})
        spans = _time(touched, calls, parents, task, phases[run] if run >= 0 else None)
        for span in spans:
            span.run, span.task = run, number
        found += spans
    return found


def each_slot(slots: Slots) -> tuple[int, ...]:
    """Return them as a tuple in any case."""
    return (slots,) if isinstance(slots, int) else slots


def tasks_of(stamps: Sequence[Stamp]) -> dict[int, Task]:
    """Sort stamps by the graph task that they were written in."""
    tasks: dict[int, Task] = {}
    task, current = Task({}, {}, []), None
    for slot, time_ns, number in stamps:
        if number != current:
            current = number
            task = tasks.setdefault(number, Task({}, {}, []))
        task.first.setdefault(slot, time_ns)
        task.last[slot] = time_ns
        task.times.append(time_ns)
    return tasks


def _run_of(task: Task, phases: Sequence[Phase]) -> int:
    """Find the innermost run that holds all stamps of the task."""
    first, last, best = min(task.times), max(task.times), -1
    for index, phase in enumerate(phases):
        holds = phase.kind == "backward" and phase.start_ns <= first and last <= phase.end_ns
        if holds and (best < 0 or phase.start_ns >= phases[best].start_ns):
            best = index
    return best


def _time(
    touched: Sequence[int], calls: Sequence[ModuleCall], parents: Sequence[int], task: Task, run: Phase | None
) -> list[BackwardCall]:
    """Time the calls that a task touched; a container holds at least what its children took."""
    among = set(touched)
    spans: dict[int, BackwardCall] = {}
    children: dict[int, list[BackwardCall]] = {}
    for index in touched:  # children first
        inner = children.get(index, [])
        span = spans[index] = _time_one(index, calls[index], inner, task, run)
        for child in inner:
            child.parent = span
        parent = parents[index]
        while parent >= 0 and parent not in among:
            parent = parents[parent]
        if parent >= 0:
            children.setdefault(parent, []).append(span)
    return sorted(spans.values(), key=lambda span: (span.start_ns, -span.end_ns, -span.call))


def _time_one(
    index: int, call: ModuleCall, inner: Sequence[BackwardCall], task: Task, run: Phase | None
) -> BackwardCall:
    if type(call.starts) is int and type(call.ends) is int:
        start_ns, end_ns = task.first.get(call.starts), task.last.get(call.ends)
        if start_ns is not None and end_ns is not None:  # nearly all
            for child in inner:
                start_ns, end_ns = min(start_ns, child.start_ns), max(end_ns, child.end_ns)
            return BackwardCall(index, -1, start_ns, end_ns)
    starts = [task.first[slot] for slot in each_slot(call.starts) if slot in task.first]
    ends = [task.last[slot] for slot in each_slot(call.ends) if slot in task.last]
    ended = bool(ends)
    starts += [child.start_ns for child in inner]
    ends += [child.end_ns for child in inner]
    estimated = error = None
    if not starts:
        # An in-place operation took the output's node away: whatever ran before is the bound.
        starts = [max((t for t in task.times if t < ends[0]), default=ends[0])]
        estimated = "start"
    if run is not None and run.error is not None and not ended:
        ends, error = [run.end_ns], run.error
    elif not ends:
        # Only part of the graph was asked for: whatever ran next is the bound.
        last = run.end_ns if run is not None else starts[0]
        ends = [min((t for t in task.times if t > starts[0]), default=last)]
        estimated = "end"
    return BackwardCall(index, -1, min(starts), max(ends), None, estimated, error)
