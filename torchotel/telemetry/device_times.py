"""From stamps by a device's clock to the time that each module call's backward took there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torchotel._records import ModuleCall, Stamp
from torchotel._utils.gil import Sliced
from torchotel.telemetry.backward import BackwardCall, Task, earliest, latest, tasks_of

Bounds: TypeAlias = tuple[int, int]


def time_on_device(
    runs: Sequence[BackwardCall], calls: Sequence[ModuleCall], stamps: Sequence[Stamp], sliced: Sliced
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
