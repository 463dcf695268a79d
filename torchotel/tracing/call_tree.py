"""Times of module calls: forward, backward and on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import TypeAlias

from torchotel._records import Error, ModuleCall, NodeTimestamp, Phase, Slots, StepRecord
from torchotel._utils.gil import GilYielder
from torchotel.tracing.span_templates import call_indices, enclosing_calls

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
    stamps: Sequence[NodeTimestamp],
    sliced: GilYielder,
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


def tasks_of(stamps: Sequence[NodeTimestamp]) -> dict[int, Task]:
    """Sort stamps by the graph task that they were written in."""
    tasks: dict[int, Task] = {}
    for number, run in groupby(stamps, key=itemgetter(2)):
        task = tasks.setdefault(number, Task({}, {}, []))
        slots, times_ns, _ = zip(*run, strict=True)
        task.first = dict(zip(reversed(slots), reversed(times_ns), strict=True)) | task.first
        task.last.update(zip(slots, times_ns, strict=True))
        task.times += times_ns
    return tasks


def _candidates(calls: Sequence[ModuleCall], tasks: Sequence[Task], sliced: GilYielder) -> list[Sequence[int]]:
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
    sliced: GilYielder,
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


Bounds: TypeAlias = tuple[int, int]


def time_on_device(
    runs: Sequence[BackwardCall], calls: Sequence[ModuleCall], stamps: Sequence[NodeTimestamp], sliced: GilYielder
) -> None:
    """Note how long backwards took by one device's clock; a container's holds those of its children.

    Args:
        runs: Parents before children.
        calls: What they are the backwards of.
        stamps: In the order that they were written, by one clock.
        sliced: Works through runs.
    """
    tasks = tasks_of(stamps)
    children: dict[int, list[Bounds]] = {}  # by `id()` of the parent
    for run in sliced(runs[::-1]):
        task = tasks.get(run.task)
        bounds = _bounds(calls[run.call], task, children.pop(id(run), [])) if task is not None else None
        if bounds is not None:
            run.device_ns = bounds[1] - bounds[0]
            if run.parent is not None:
                children.setdefault(id(run.parent), []).append(bounds)


def _bounds(call: ModuleCall, task: Task, inner: Sequence[Bounds]) -> Bounds | None:
    own = earliest(task.first, call.starts), latest(task.last, call.ends)
    starts = [start_ns for start_ns in (own[0], *(bounds[0] for bounds in inner)) if start_ns is not None]
    ends = [end_ns for end_ns in (own[1], *(bounds[1] for bounds in inner)) if end_ns is not None]
    # Where nodes ran on several streams one may end before another has begun.
    return (min(starts), max(ends)) if starts and ends and min(starts) <= max(ends) else None


KEPT_CALLS = 4  # steps of a thread whose calls a later backward may still run through


@dataclass(frozen=True, slots=True, eq=False)
class Timed:
    """The module calls of a step or an evaluation and their backwards; sequences go with `calls`."""

    calls: Sequence[ModuleCall] = ()
    """Children before parents; first those of earlier steps, where a backward of this one ran through them."""
    own: int = 0
    """Index of the first call of this step."""
    parents: Sequence[int] = ()
    """Index of the enclosing call, -1: none."""
    hidden: Sequence[bool] = ()
    """Whether the call is inside a compiled region, which shows nothing of what it runs."""
    indices: Sequence[int | None] = ()
    """From 0, n-th call of the module in the step, where it runs more than once."""
    runs: Sequence[BackwardCall] = ()
    """Backwards of calls, parents first."""
    device_ns: Mapping[int, int] = field(default_factory=dict)
    """What forwards took by the clock of their device, by the index of the call."""


_NOTHING = Timed()


class CallTimer:
    """Time the calls of records in the order that they come; keeps what a later backward may run through.

    Args:
        sliced: Works through calls.
    """

    def __init__(self, sliced: GilYielder) -> None:
        self._sliced = sliced
        self._earlier: dict[int, list[Sequence[ModuleCall]]] = {}

    def time(self, unit: StepRecord) -> Timed:
        """Find out what enclosed each call, and when its backwards ran."""
        stamps = _own_stamps(unit)
        if not unit.calls and not stamps:
            return _NOTHING
        earlier = self._earlier.setdefault(unit.thread, [])
        before = [call for calls in earlier for call in calls] if _reaches_back(unit.calls, stamps) else []
        calls, own = [*before, *unit.calls], len(before)
        sliced = self._sliced
        parents = enclosing_calls(unit.calls, sliced)
        if before:
            parents = enclosing_calls(before, sliced) + [p + own if p >= 0 else -1 for p in parents]
        earlier.append(unit.calls)
        del earlier[:-KEPT_CALLS]
        runs = backward_calls(calls, parents, unit.phases, stamps, sliced)
        forwards_ns: dict[int, int] = {}
        for times in unit.device_times:
            forwards_ns.update(times.forwards_ns)
            for clock in times.clocks:
                time_on_device(runs, calls, clock, sliced)
        return Timed(
            calls,
            own,
            parents,
            _hidden(calls, parents, sliced),
            [None] * own + call_indices(unit.calls, sliced),
            runs,
            _on_device(calls, forwards_ns) if forwards_ns else {},
        )


def _on_device(calls: Sequence[ModuleCall], forwards_ns: Mapping[int, int]) -> dict[int, int]:
    return {i: forwards_ns[slot] for i, call in enumerate(calls) if (slot := call.device_slot) in forwards_ns}


def _hidden(calls: Sequence[ModuleCall], parents: Sequence[int], sliced: GilYielder) -> list[bool]:
    hidden = [False] * len(calls)
    for index in sliced(range(len(calls) - 1, -1, -1)):  # parents first
        outer = parents[index]
        hidden[index] = outer >= 0 and (hidden[outer] or calls[outer].site.compiled)
    return hidden


def _own_stamps(unit: StepRecord) -> Sequence[NodeTimestamp]:
    """Leave out those after the end: a forward on a thread of its own runs backward in the step of another."""
    if unit.stamps and unit.stamps[-1][1] > unit.end_ns:
        return [stamp for stamp in unit.stamps if stamp[1] <= unit.end_ns]
    return unit.stamps


def _reaches_back(calls: Sequence[ModuleCall], stamps: Sequence[NodeTimestamp]) -> bool:
    """Tell whether a backward ran through calls of an earlier step: their slots are lower than any of this one's."""
    if not stamps:
        return False
    for call in calls:  # slots only grow, and the first call to end has the lowest
        own = [min(slots) if isinstance(slots, tuple) else slots for slots in (call.starts, call.ends) if slots != ()]
        if own:
            return min(stamps)[0] < min(own)
    return True
