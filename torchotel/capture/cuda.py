"""CUDA: device times from events, and device memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Module

from torchotel._records import NO_CLOCK, DeviceMemory, DeviceTimes, NodeTimestamp
from torchotel._utils.faults import Guard
from torchotel.capture.async_readback import is_capturing
from torchotel.capture.torch_internals import has_context, without_torch_function


class TimedEvent(Protocol):
    """A moment of a device's stream, such as `torch.cuda.Event(enable_timing=True)`."""

    def query(self) -> bool:
        """Tell whether it was reached, without waiting."""

    def synchronize(self) -> None:
        """Wait for it."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds from this one to another of the same device; both were reached."""


class Clock(Protocol):
    """The clocks of devices: CUDA's, or what stands for them in a test."""

    def is_running(self) -> bool:
        """Tell whether this process uses such a device; starts none."""

    def device_of(self, tensor: Tensor) -> int | None:
        """Return the index of the device that a tensor is on; None for one that has no such clock."""

    def current(self) -> int:
        """Return the index of the calling thread's current device."""

    def new_event(self) -> TimedEvent:
        """Return an event that was never recorded."""

    def record(self, event: Any, device: int) -> None:
        """Put an event into the calling thread's current stream of a device."""


class CudaClock:
    """That of CUDA devices, and of AMD's, which torch gives the same name."""

    def is_running(self) -> bool:
        """Tell whether this process uses such a device; starts none."""
        return bool(torch.cuda.is_initialized())

    def device_of(self, tensor: Tensor) -> int | None:
        """Return the index of the device that a tensor is on; None for one that has no such clock."""
        return tensor.get_device() if tensor.is_cuda else None

    def current(self) -> int:
        """Return the index of the calling thread's current device."""
        return torch.cuda.current_device()

    def new_event(self) -> torch.cuda.Event:
        """Return an event that was never recorded."""
        return torch.cuda.Event(enable_timing=True)

    def record(self, event: torch.cuda.Event, device: int) -> None:
        """Put an event into the calling thread's current stream of a device."""
        event.record(torch.cuda.current_stream(device))


MAX_POOLED = 1 << 14  # events of a device that wait for their next use
MAX_FORWARDS = 1 << 16  # of one part

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

    def check_running(self) -> None:
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

    def release(self, marks: Sequence[Mark]) -> None:
        """Take events back that nobody will read; recording one again takes it from where it still stands."""
        for device, event in marks:
            pool = self._pools.setdefault(device, [])
            if len(pool) < MAX_POOLED:
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
        end = self._marks.record(start.device) if len(self._forwards) < MAX_FORWARDS else None
        if end is None:
            self._marks.release([start])
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

    def drain(self) -> PendingDeviceTimes | None:
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
        self._marks.release(marks)

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
        clocks: dict[int, list[NodeTimestamp]] = {}
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


class Memory:
    """Ask the CUDA devices that this process uses; an allocator that keeps no count is asked once."""

    def __init__(self) -> None:
        self.guard = Guard("device memory", limit=1)

    def read(self) -> tuple[DeviceMemory, ...]:
        """Return the memory of each; none where it can't be told. Raises nothing, and waits for nothing."""
        if self.guard.is_off:
            return ()
        try:
            return device_memory()
        except Exception:  # noqa: BLE001  # what an allocator of the user's raises is of no matter to the step
            self.guard.fault()
            return ()


def device_memory() -> tuple[DeviceMemory, ...]:
    """Return the memory of the CUDA devices that this process uses; it waits for nothing.

    The peak is that since the program's start, or since it reset it.
    """
    if not torch.cuda.is_initialized():  # to ask any other would start CUDA
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        if not has_context(index):
            continue  # some allocators would start it
        stats = torch.cuda.memory_stats_as_nested_dict(index)
        if not stats or not stats["reserved_bytes"]["all"]["peak"]:
            continue
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        found.append(DeviceMemory(f"cuda:{index}", allocated["current"], reserved["current"], allocated["peak"]))
    return tuple(found)
