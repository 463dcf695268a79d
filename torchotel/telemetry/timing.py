"""What ran inside what and for how long: read once from a record, for its spans and for its metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchotel._records import ModuleCall, Stamp, Unit
from torchotel._utils.gil import Sliced
from torchotel.telemetry.backward import BackwardCall, backward_calls
from torchotel.telemetry.calls import call_indices, enclosing_calls
from torchotel.telemetry.device_times import time_on_device

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

    def __init__(self, sliced: Sliced) -> None:
        self._sliced = sliced
        self._earlier: dict[int, list[Sequence[ModuleCall]]] = {}

    def time(self, unit: Unit) -> Timed:
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


def _hidden(calls: Sequence[ModuleCall], parents: Sequence[int], sliced: Sliced) -> list[bool]:
    hidden = [False] * len(calls)
    for index in sliced(range(len(calls) - 1, -1, -1)):  # parents first
        outer = parents[index]
        hidden[index] = outer >= 0 and (hidden[outer] or calls[outer].site.compiled)
    return hidden


def _own_stamps(unit: Unit) -> Sequence[Stamp]:
    """Leave out those after the end: a forward on a thread of its own runs backward in the step of another."""
    if unit.stamps and unit.stamps[-1][1] > unit.end_ns:
        return [stamp for stamp in unit.stamps if stamp[1] <= unit.end_ns]
    return unit.stamps


def _reaches_back(calls: Sequence[ModuleCall], stamps: Sequence[Stamp]) -> bool:
    """Tell whether a backward ran through calls of an earlier step: their slots are lower than any of this one's."""
    if not stamps:
        return False
    for call in calls:  # slots only grow, and the first call to end has the lowest
        own = [min(slots) if isinstance(slots, tuple) else slots for slots in (call.starts, call.ends) if slots != ()]
        if own:
            return min(stamps)[0] < min(own)
    return True
