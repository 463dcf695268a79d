"""The tree of a record's module calls, and the times of their backwards on the host and on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import TypeAlias

from torchotel._records import DeviceTimes, Error, ModuleCall, NodeTimestamp, Phase, Slots, StepRecord, uncovered_ns
from torchotel._utils.gil import GilYielder

MAX_EARLIER_STEPS = 4
"""Steps of a thread whose calls are kept, since the backward of a later step may run through them."""

_start, _end = attrgetter("start_ns"), attrgetter("end_ns")

Bounds: TypeAlias = tuple[int, int]


@dataclass(slots=True, eq=False)
class BackwardCall:
    """The backward of one module call in one run of the autograd engine."""

    call: int
    """Index of the module call."""
    phase: int
    """Index of the backward phase; -1 if no phase holds the run."""
    start_ns: int
    end_ns: int
    parent: BackwardCall | None = None
    """The backward, in the same graph task, of the nearest enclosing call that has one."""
    estimated: str | None = None
    error: Error | None = None
    task: int = -1
    """The engine's number of the graph task; a nested run has a task of its own."""
    device_ns: int | None = None
    """Duration by the clock of the call's device; None without a device clock."""


@dataclass(slots=True, eq=False)
class GraphTask:
    """The timestamps of one graph task: the first and the last of each slot, and all times."""

    first: dict[int, int]
    last: dict[int, int]
    times: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class CallTree:
    """The module calls of a record and their backwards. Each sequence but `backwards` has one entry per call."""

    calls: Sequence[ModuleCall] = ()
    """Children before parents. If a backward ran through calls of earlier steps, these calls come first."""
    first_own: int = 0
    """Index of the record's first call; the calls before it are of earlier steps."""
    parents: Sequence[int] = ()
    """Index of the enclosing call; -1 if there is none."""
    hidden: Sequence[bool] = ()
    """Whether the call is inside a compiled region, which is recorded as one call."""
    indices: Sequence[int | None] = ()
    """Number of the call, from 0, among the calls of its module in the step; None if the module ran once."""
    backwards: Sequence[BackwardCall] = ()
    """Parents before children."""
    device_ns: Mapping[int, int] = field(default_factory=dict)
    """Durations of forwards by the clock of their device, by index of the call."""


_EMPTY = CallTree()


class CallTreeBuilder:
    """Build the call trees of records, in the order of the records.

    Args:
        yielder: Iterates over calls.
    """

    def __init__(self, yielder: GilYielder) -> None:
        self._yielder = yielder
        self._earlier: dict[int, list[Sequence[ModuleCall]]] = {}
        """Calls of the last steps, by thread."""

    def build(self, record: StepRecord) -> CallTree:
        """Return the call tree of a record."""
        timestamps = _own_timestamps(record)
        if not record.calls and not timestamps:
            return _EMPTY
        yielder = self._yielder
        earlier = self._earlier_calls(record, timestamps)
        calls = [*earlier, *record.calls]
        parents = _find_parents(earlier, record.calls, yielder)
        backwards = backward_calls(calls, parents, record.phases, timestamps, yielder)
        return CallTree(
            calls,
            len(earlier),
            parents,
            _find_hidden(calls, parents, yielder),
            [None] * len(earlier) + call_indices(record.calls, yielder),
            backwards,
            _set_device_times(calls, backwards, record.device_times, yielder),
        )

    def _earlier_calls(self, record: StepRecord, timestamps: Sequence[NodeTimestamp]) -> list[ModuleCall]:
        """Return the calls of earlier steps if the record's backward ran through them, and keep the record's calls."""
        earlier = self._earlier.setdefault(record.thread, [])
        found = [call for calls in earlier for call in calls] if _reaches_back(record.calls, timestamps) else []
        earlier.append(record.calls)
        del earlier[:-MAX_EARLIER_STEPS]
        return found


def enclosing_calls(calls: Sequence[ModuleCall], yielder: GilYielder) -> list[int]:
    """Return the index of each call's enclosing call, -1 if there is none; children stand before their parents.

    Calls of different lanes may overlap in time and do not enclose each other.
    """
    parents = [-1] * len(calls)
    open_calls: list[tuple[int, int, int]] = []  # index, start, lane
    for index in yielder(range(len(calls) - 1, -1, -1)):
        start_ns, note = calls[index].start_ns, calls[index].note
        lane = 0 if note is None else note.lane
        while open_calls and (open_calls[-1][1] > start_ns or open_calls[-1][2] not in (0, lane)):
            open_calls.pop()
        if open_calls:
            parents[index] = open_calls[-1][0]
        open_calls.append((index, start_ns, lane))
    return parents


def call_indices(calls: Sequence[ModuleCall], yielder: GilYielder) -> list[int | None]:
    """Number the calls of each module that ran more than once by their start; recomputation does not count."""
    indices: list[int | None] = [None] * len(calls)
    if len({call.signature.module for call in yielder(calls)}) == len(calls):
        return indices  # no module ran twice
    counts = Counter(call.signature.module for call in yielder(calls) if not _is_recomputed(call))
    numbered = [
        i for i in yielder(range(len(calls))) if counts[calls[i].signature.module] > 1 and not _is_recomputed(calls[i])
    ]
    seen: Counter[object] = Counter()
    for index in yielder(sorted(numbered, key=lambda i: calls[i].start_ns)):
        module = calls[index].signature.module
        indices[index] = seen[module]
        seen[module] += 1
    return indices


def _is_recomputed(call: ModuleCall) -> bool:
    return call.note is not None and call.note.recompute


def _find_parents(earlier: Sequence[ModuleCall], own: Sequence[ModuleCall], yielder: GilYielder) -> Sequence[int]:
    parents = enclosing_calls(own, yielder)
    if not earlier:
        return parents
    return enclosing_calls(earlier, yielder) + [parent + len(earlier) if parent >= 0 else -1 for parent in parents]


def _find_hidden(calls: Sequence[ModuleCall], parents: Sequence[int], yielder: GilYielder) -> list[bool]:
    hidden = [False] * len(calls)
    for index in yielder(range(len(calls) - 1, -1, -1)):  # parents first
        parent = parents[index]
        hidden[index] = parent >= 0 and (hidden[parent] or calls[parent].signature.compiled)
    return hidden


def _own_timestamps(record: StepRecord) -> Sequence[NodeTimestamp]:
    """Leave out timestamps after the record's end.

    The graph of a forward on one thread may run backward in the step of another thread.
    """
    if record.timestamps and record.timestamps[-1][1] > record.end_ns:
        return [timestamp for timestamp in record.timestamps if timestamp[1] <= record.end_ns]
    return record.timestamps


def _reaches_back(calls: Sequence[ModuleCall], timestamps: Sequence[NodeTimestamp]) -> bool:
    """Return whether a backward ran through calls of an earlier step, whose slots are lower than those of `calls`."""
    if not timestamps:
        return False
    for call in calls:  # slots only grow, and the first call to end has the lowest
        own = [min(slots) if isinstance(slots, tuple) else slots for slots in (call.starts, call.ends) if slots != ()]
        if own:
            return min(timestamps)[0] < min(own)
    return True


def backward_calls(
    calls: Sequence[ModuleCall],
    parents: Sequence[int],
    phases: Sequence[Phase],
    timestamps: Sequence[NodeTimestamp],
    yielder: GilYielder,
) -> list[BackwardCall]:
    """Return the backward of each call in each run of the engine, parents first and siblings by their start.

    Args:
        calls: Children before parents.
        parents: Index of each call's enclosing call, -1 if there is none.
        phases: The phases of the step; the backward phases bound the runs.
        timestamps: In the order in which they were written.
        yielder: Iterates over calls.
    """
    tasks = graph_tasks(timestamps)
    found: list[BackwardCall] = []
    for (number, task), candidates in zip(
        tasks.items(), _find_candidates(calls, list(tasks.values()), yielder), strict=True
    ):
        phase = _find_phase(task, phases)
        backwards = _time_backwards(calls, parents, candidates, task, phases[phase] if phase >= 0 else None, yielder)
        for backward in yielder(backwards):
            backward.phase, backward.task = phase, number
        found += backwards
    return found


def earliest(times_ns: Mapping[int, int], slots: Slots) -> int | None:
    """Return the earliest time at these slots; None if they have no time."""
    if isinstance(slots, int):
        return times_ns.get(slots)
    return min((times_ns[slot] for slot in slots if slot in times_ns), default=None)


def latest(times_ns: Mapping[int, int], slots: Slots) -> int | None:
    """Return the latest time at these slots; None if they have no time."""
    if isinstance(slots, int):
        return times_ns.get(slots)
    return max((times_ns[slot] for slot in slots if slot in times_ns), default=None)


def graph_tasks(timestamps: Sequence[NodeTimestamp]) -> dict[int, GraphTask]:
    """Group timestamps by the graph task that wrote them."""
    tasks: dict[int, GraphTask] = {}
    for number, group in groupby(timestamps, key=itemgetter(2)):
        task = tasks.setdefault(number, GraphTask({}, {}, []))
        slots, times_ns, _ = zip(*group, strict=True)
        task.first = dict(zip(reversed(slots), reversed(times_ns), strict=True)) | task.first
        task.last.update(zip(slots, times_ns, strict=True))
        task.times += times_ns
    return tasks


def _find_candidates(
    calls: Sequence[ModuleCall], tasks: Sequence[GraphTask], yielder: GilYielder
) -> list[Sequence[int]]:
    """Return, for each task, the calls that it may have run through, in their order."""
    if len(tasks) == 1:  # nearly always
        return [range(len(calls))]
    users: dict[int, list[int]] = {}
    for index in yielder(range(len(calls))):
        call = calls[index]
        for slots in (call.starts, call.ends):
            for slot in (slots,) if isinstance(slots, int) else slots:
                users.setdefault(slot, []).append(index)
    return [sorted({index for slot in yielder(task.first) for index in users.get(slot, ())}) for task in tasks]


def _find_phase(task: GraphTask, phases: Sequence[Phase]) -> int:
    """Return the index of the innermost backward phase that holds all timestamps of the task; -1 if none does."""
    first, last, best = min(task.times), max(task.times), -1
    for index, phase in enumerate(phases):
        holds = phase.kind == "backward" and phase.start_ns <= first and last <= phase.end_ns
        if holds and (best < 0 or phase.start_ns >= phases[best].start_ns):
            best = index
    return best


def _time_backwards(
    calls: Sequence[ModuleCall],
    parents: Sequence[int],
    candidates: Sequence[int],
    task: GraphTask,
    phase: Phase | None,
    yielder: GilYielder,
) -> list[BackwardCall]:
    """Time the calls that a task ran through; a container lasts at least as long as its children."""
    bounds = _find_bounds(calls, candidates, task, yielder)
    backwards: list[BackwardCall] = []
    children: dict[int, list[BackwardCall]] = {}
    for index in yielder(bounds):  # children first
        start_ns, end_ns = bounds[index]
        inner = children.pop(index, [])
        if start_ns is None or end_ns is None:
            backward = _estimate(index, start_ns, end_ns, inner, task, phase)
        else:
            backward = BackwardCall(index, -1, start_ns, end_ns)
            if inner:
                backward.start_ns = min(start_ns, *map(_start, inner))
                backward.end_ns = max(end_ns, *map(_end, inner))
        for child in yielder(inner):
            child.parent = backward
        parent = parents[index]
        while parent >= 0 and parent not in bounds:
            parent = parents[parent]
        if parent >= 0:
            children.setdefault(parent, []).append(backward)
        backwards.append(backward)
    backwards.reverse()  # the sort is stable: a parent stays before a child with the same start
    backwards.sort(key=_start)
    return backwards


def _find_bounds(
    calls: Sequence[ModuleCall], candidates: Sequence[int], task: GraphTask, yielder: GilYielder
) -> dict[int, tuple[int | None, int | None]]:
    """Return start and end of the backward of each call that has a timestamp, by index of the call."""
    bounds: dict[int, tuple[int | None, int | None]] = {}
    first, last = task.first, task.last
    for index in yielder(candidates):
        _, _, _, starts, ends, _, _ = calls[index]
        start_ns = first.get(starts) if type(starts) is int else earliest(first, starts)
        end_ns = last.get(ends) if type(ends) is int else latest(last, ends)
        if start_ns is not None or end_ns is not None:
            bounds[index] = start_ns, end_ns
    return bounds


def _estimate(
    index: int,
    start_ns: int | None,
    end_ns: int | None,
    inner: Sequence[BackwardCall],
    task: GraphTask,
    phase: Phase | None,
) -> BackwardCall:
    """Time a call that lacks the timestamp of its start or its end."""
    starts = [child.start_ns for child in inner] + ([] if start_ns is None else [start_ns])
    ends = [child.end_ns for child in inner] + ([] if end_ns is None else [end_ns])
    estimated = error = None
    if not starts:
        # An in-place operation replaced the output's node; the node that ran before is the bound.
        starts = [max((t for t in task.times if t < ends[0]), default=ends[0])]
        estimated = "start"
    if phase is not None and phase.error is not None and end_ns is None:
        ends, error = [phase.end_ns], phase.error
    elif not ends:
        # The engine ran only part of the graph (`inputs=`); the node that ran next is the bound.
        last = phase.end_ns if phase is not None else starts[0]
        ends = [min((t for t in task.times if t > starts[0]), default=last)]
        estimated = "end"
    return BackwardCall(index, -1, min(starts), max(ends), None, estimated, error)


def _set_device_times(
    calls: Sequence[ModuleCall],
    backwards: Sequence[BackwardCall],
    device_times: Sequence[DeviceTimes],
    yielder: GilYielder,
) -> dict[int, int]:
    """Set the device times of the backwards, and return those of the forwards by index of the call."""
    forwards_ns: dict[int, int] = {}
    for times in device_times:
        forwards_ns.update(times.forwards_ns)
        for clock in times.clocks:
            time_on_device(backwards, calls, clock, yielder)
    if not forwards_ns:
        return {}
    return {i: forwards_ns[slot] for i, call in enumerate(calls) if (slot := call.device_slot) in forwards_ns}


def time_on_device(
    backwards: Sequence[BackwardCall],
    calls: Sequence[ModuleCall],
    timestamps: Sequence[NodeTimestamp],
    yielder: GilYielder,
) -> None:
    """Set the durations of backwards by one device's clock; a container includes its children.

    Args:
        backwards: Parents before children.
        calls: The calls that the indices in `backwards` are of.
        timestamps: In the order in which they were written, by one clock.
        yielder: Iterates over backwards.
    """
    tasks = graph_tasks(timestamps)
    children: dict[int, list[Bounds]] = {}  # by `id()` of the parent
    for backward in yielder(backwards[::-1]):
        task = tasks.get(backward.task)
        bounds = None
        if task is not None:
            bounds = _device_bounds(calls[backward.call], task, children.pop(id(backward), []))
        if bounds is not None:
            backward.device_ns = bounds[1] - bounds[0]
            if backward.parent is not None:
                children.setdefault(id(backward.parent), []).append(bounds)


def _device_bounds(call: ModuleCall, task: GraphTask, inner: Sequence[Bounds]) -> Bounds | None:
    own = earliest(task.first, call.starts), latest(task.last, call.ends)
    starts = [start_ns for start_ns in (own[0], *(bounds[0] for bounds in inner)) if start_ns is not None]
    ends = [end_ns for end_ns in (own[1], *(bounds[1] for bounds in inner)) if end_ns is not None]
    # If nodes ran on several streams, one node may end before another begins.
    return (min(starts), max(ends)) if starts and ends and min(starts) <= max(ends) else None


def bubble_ratio(record: StepRecord, tree: CallTree, yielder: GilYielder) -> float | None:
    """Return the share of a schedule's time without a forward or a backward of this rank; None without a schedule.

    The schedule lasts from the first forward of a stage to the end of the last backward. On a device other than the
    CPU the calls return before the device has run them, so the share is not known.
    """
    own = yielder(range(tree.first_own, len(tree.calls)))
    forwards = [tree.calls[index] for index in own if tree.parents[index] < 0]
    stages = [call for call in forwards if call.note is not None and call.note.microbatch is not None]
    if not stages or any(call.signature.device not in {None, "cpu"} for call in stages):
        return None
    start_ns = min(call.start_ns for call in stages)
    busy = [(call.start_ns, call.end_ns) for call in forwards]
    busy += [(phase.start_ns, phase.end_ns) for phase in record.phases if phase.kind == "backward"]
    busy = [(begun_ns, ended_ns) for begun_ns, ended_ns in busy if begun_ns >= start_ns]
    length_ns = max(ended_ns for _, ended_ns in busy) - start_ns
    return 1 - sum(uncovered_ns(sorted(busy))) / length_ns if length_ns else 0.0
