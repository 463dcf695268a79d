"""What calls take on the clock of their device: pooled events on its streams, read when they have been reached.

A call's time is from what its stream had been given before it to what it was given last by it, so where the stream
ran dry in between, the wait counts too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Module

from torchotel._records import NO_CLOCK, DeviceTimes, Stamp
from torchotel._utils.faults import Guard
from torchotel.capture.device_clock import Clock, TimedEvent
from torchotel.capture.readings import is_capturing
from torchotel.capture.seams import without_torch_function

MOST_POOLED = 1 << 14  # events of a device that wait for their next use
MOST_FORWARDS = 1 << 16  # of one part

_next_slot = count(NO_CLOCK + 1).__next__


class Mark(NamedTuple):
    """An event that was recorded, and its device."""

    device: int
    event: TimedEvent


class DeviceMarks:
    """Record events and use them again; what goes wrong ends device times alone."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pools: dict[int, list[TimedEvent]] = {}
        self.guard = Guard("device times", off=self._off)
        self.on = False
        """Whether this process uses a device that has a clock, as of the last outermost forward."""

    def look(self) -> None:
        """See whether there is a device by now."""
        self.on = self._clock.is_running() and not self.guard.is_off

    def begin(self, module: Module, args: Any) -> Mark | None:
        """Mark the start of a call on the device of its first input, or else parameter. Raises nothing."""
        try:
            with without_torch_function():  # subclasses and modes would see what we ask
                first = next((arg for arg in args if isinstance(arg, Tensor)), None)
                if first is None:  # its inputs all have names
                    first = next(module.parameters(), None)
                device = self._clock.device_of(first) if first is not None else None
            return self._record(device) if device is not None else None
        except Exception:  # noqa: BLE001  # nothing of ours may reach the user's forward
            self.guard.fault()
            return None

    def record(self, device: int | None = None) -> Mark | None:
        """Mark this moment, on the current device if none is named. Raises nothing."""
        try:
            return self._record(device)
        except Exception:  # noqa: BLE001  # nothing of ours may reach the user's forward or backward
            self.guard.fault()
            return None

    def _record(self, device: int | None) -> Mark | None:
        if not self.on or is_capturing():  # in a captured graph an event would be part of it
            return None
        index = self._clock.current() if device is None else device
        pool = self._pools.setdefault(index, [])
        try:
            event = pool.pop()
        except IndexError:
            event = self._clock.new_event()
        self._clock.record(event, index)
        return Mark(index, event)

    def give_back(self, marks: Sequence[Mark]) -> None:
        """Take events back that nobody will read; recording one again takes it from where it still stands."""
        for device, event in marks:
            pool = self._pools.setdefault(device, [])
            if len(pool) < MOST_POOLED:
                pool.append(event)

    def _off(self) -> None:
        self.on = False
        self._pools.clear()


class DeviceLog:
    """What a thread's calls have marked since it was last taken; nodes of their graphs write to it from any thread."""

    def __init__(self, marks: DeviceMarks) -> None:
        self._marks = marks
        self._forwards: list[tuple[int, Mark, Mark]] = []
        self._stamps: list[tuple[int, int, Mark]] = []

    def call_ended(self, start: Mark) -> int:
        """Mark the end of a call's forward; return the slot where its time is found."""
        end = self._marks.record(start.device) if len(self._forwards) < MOST_FORWARDS else None
        if end is None:
            self._marks.give_back([start])
            return NO_CLOCK
        slot = _next_slot()
        self._forwards.append((slot, start, end))
        return slot

    def stamp(self, slot: int, task: int) -> None:
        """Keep the moment on the device that runs the node of a graph."""
        if (mark := self._marks.record()) is not None:
            self._stamps.append((slot, task, mark))

    def move(self, to: DeviceLog) -> None:
        """Hand what there is to another thread's."""
        forwards, self._forwards = self._forwards, []
        to._forwards += forwards

    def take(self) -> PendingDeviceTimes | None:
        """Return what there is, on its way; None for nothing."""
        if not (self._forwards or self._stamps):
            return None
        taken = PendingDeviceTimes(self._marks, self._forwards, self._stamps.copy())
        # Cleared in place: hooks of nodes hold on to this log.
        self._forwards = []
        self._stamps.clear()
        return taken


class PendingDeviceTimes:
    """Device times of the calls of a part of a step, until their events are reached."""

    def __init__(
        self, marks: DeviceMarks, forwards: Sequence[tuple[int, Mark, Mark]], stamps: Sequence[tuple[int, int, Mark]]
    ) -> None:
        self._marks, self._forwards, self._stamps = marks, forwards, stamps
        self._all = [mark for _, *pair in forwards for mark in pair] + [mark for _, _, mark in stamps]
        self._left = self._all[::-1]  # the first to be reached is the last
        self._times: DeviceTimes | None = None

    def ready(self) -> bool:
        """Tell whether they are there, without waiting; to be asked on a training thread."""
        return self._look(lambda event: event.query())

    def wait(self) -> None:
        """Wait until they are there."""
        self._look(_reached)

    def result(self) -> DeviceTimes | None:
        """Return them; None where they have not come, and then they never will."""
        self.drop()
        return self._times

    def drop(self) -> None:
        """Give the events back."""
        marks, self._all, self._left = self._all, [], []
        self._marks.give_back(marks)

    def _look(self, reached: Callable[[TimedEvent], bool]) -> bool:
        try:
            if self._left and is_capturing():
                return False  # a query would end the capture of a CUDA graph
            while self._left:
                if not reached(self._left[-1].event):
                    return False
                self._left.pop()
            if self._all:
                self._times = self._read()
                self.drop()
        except Exception:  # noqa: BLE001  # a step is handed over without them
            self._marks.guard.fault()
            self._all, self._left = [], []
        return True

    def _read(self) -> DeviceTimes:
        forwards_ns = {slot: _between_ns(start, end) for slot, start, end in self._forwards}
        clocks: dict[int, list[Stamp]] = {}
        origins: dict[int, Mark] = {}  # of this part: elapsed times are single floats, and lose digits by the minute
        for slot, task, mark in self._stamps:
            time_ns = _between_ns(origins.setdefault(mark.device, mark), mark)
            clocks.setdefault(mark.device, []).append((slot, time_ns, task))
        return DeviceTimes(forwards_ns, list(clocks.values()))


def _between_ns(start: Mark, end: Mark) -> int:
    return 0 if start is end else round(start.event.elapsed_time(end.event) * 1e6)


def _reached(event: TimedEvent) -> bool:
    event.synchronize()
    return True
