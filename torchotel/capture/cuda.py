"""CUDA: device times from events, and device memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import AcceleratorError, Tensor
from torch.nn import Module

from torchotel._records import NO_CLOCK, DeviceMemory, DeviceTimes, NodeTimestamp
from torchotel._utils.faults import Guard
from torchotel.capture.async_readback import has_failed, is_capturing, keep_for_good
from torchotel.capture.torch_internals import has_context, without_torch_function


class TimedEvent(Protocol):
    """An event of a device's stream, such as `torch.cuda.Event(enable_timing=True)`."""

    def query(self) -> bool:
        """Return whether the stream has reached the event, without waiting."""

    def synchronize(self) -> None:
        """Wait until the stream reaches the event."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds from this event to another of the same device; both were reached."""


class Clock(Protocol):
    """The clocks of devices."""

    @property
    def pools(self) -> dict[int, list[TimedEvent]]:
        """Unused events, by the index of their device."""

    def is_running(self) -> bool:
        """Return whether this process uses such a device, without initialising one."""

    def device_of(self, tensor: Tensor) -> int | None:
        """Return the index of the device that a tensor is on; None for a device without a clock."""

    def current(self) -> int:
        """Return the index of the calling thread's current device."""

    def new_event(self) -> TimedEvent:
        """Return an event that was never recorded."""

    def record(self, event: Any, device: int) -> None:
        """Put an event into the calling thread's current stream of a device."""


class CudaClock:
    """The clock of CUDA devices and of AMD devices, which torch also calls `cuda`."""

    pools: ClassVar[dict[int, list[TimedEvent]]] = {}
    """Of all clocks. The events are never destroyed: if their device has failed, each destructor would print a line."""

    def is_running(self) -> bool:
        """Return whether this process uses such a device, without initialising one."""
        return bool(torch.cuda.is_initialized())

    def device_of(self, tensor: Tensor) -> int | None:
        """Return the index of the device that a tensor is on; None for a device without a clock."""
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


keep_for_good(CudaClock.pools)

MAX_POOLED = 1 << 14  # unused events kept for each device
MAX_FORWARDS = 1 << 16  # timed for one segment

_next_slot = count(NO_CLOCK + 1).__next__


class Mark(NamedTuple):
    """An event that was recorded, and its device."""

    device: int
    event: TimedEvent


class DeviceMarks:
    """Record events and reuse them; errors switch off device times only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pools = clock.pools
        self.guard = Guard("device times", off=self._off)
        self.on = False
        """Whether this process used a device with a clock at the last root forward."""

    def check_running(self) -> None:
        """Check whether this process uses a device."""
        self.on = self._clock.is_running() and not self.guard.is_off

    def begin(self, module: Module, args: Any) -> Mark | None:
        """Mark the start of a call on the device of its first input, or else parameter. Raises nothing."""
        try:
            with without_torch_function():  # subclasses and modes would see the calls
                first = next((arg for arg in args if isinstance(arg, Tensor)), None)
                if first is None:  # all inputs are keyword arguments
                    first = next(module.parameters(), None)
                device = self._clock.device_of(first) if first is not None else None
            return self._record(device) if device is not None else None
        except Exception as error:  # noqa: BLE001  # no internal error may reach the user's forward
            self.fault(error)
            return None

    def record(self, device: int | None = None) -> Mark | None:
        """Record an event on a device, by default the current one. Raises nothing."""
        try:
            return self._record(device)
        except Exception as error:  # noqa: BLE001  # no internal error may reach the user's forward or backward
            self.fault(error)
            return None

    def _record(self, device: int | None) -> Mark | None:
        if not self.on or is_capturing():  # the event would become part of the captured graph
            return None
        index = self._clock.current() if device is None else device
        pool = self._pools.setdefault(index, [])
        try:
            event = pool.pop()
        except IndexError:
            event = self._clock.new_event()
        try:
            self._clock.record(event, index)
        except BaseException:
            pool.append(event)
            raise
        return Mark(index, event)

    def release(self, marks: Sequence[Mark]) -> None:
        """Return events to the pool that are not read any more; recording an event again moves it."""
        for device, event in marks:
            pool = self._pools.setdefault(device, [])
            if len(pool) < MAX_POOLED:
                pool.append(event)

    def fault(self, error: Exception) -> None:
        """Count an internal error, which the error of a device that has failed is not."""
        if not (isinstance(error, AcceleratorError) and has_failed()):
            self.guard.fault()

    def _off(self) -> None:
        self.on = False


class DeviceLog:
    """The events of a thread's calls since the last segment; nodes of the calls' graphs add to it from any thread."""

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
        """Record an event on the device that runs a node."""
        if (mark := self._marks.record()) is not None:
            self._stamps.append((slot, task, mark))

    def move(self, to: DeviceLog) -> None:
        """Move the forwards to another thread's log."""
        forwards, self._forwards = self._forwards, []
        to._forwards += forwards

    def drain(self) -> PendingDeviceTimes | None:
        """Return the device times of all events, which may not be ready; None if there are none."""
        if not (self._forwards or self._stamps):
            return None
        taken = PendingDeviceTimes(self._marks, self._forwards, self._stamps.copy())
        # Cleared in place: hooks of nodes keep this log.
        self._forwards = []
        self._stamps.clear()
        return taken


class PendingDeviceTimes:
    """Device times of the calls of a segment, until their events are reached."""

    def __init__(
        self, marks: DeviceMarks, forwards: Sequence[tuple[int, Mark, Mark]], stamps: Sequence[tuple[int, int, Mark]]
    ) -> None:
        self._marks, self._forwards, self._stamps = marks, forwards, stamps
        self._all = [mark for _, *pair in forwards for mark in pair] + [mark for _, _, mark in stamps]
        self._left = self._all[::-1]  # in order of recording from the end
        self._times: DeviceTimes | None = None

    def ready(self) -> bool:
        """Return whether the times are ready, without waiting; for a training thread."""
        return self._look(lambda event: event.query())

    def wait(self) -> None:
        """Wait until the times are ready."""
        self._look(_reached)

    def result(self) -> DeviceTimes | None:
        """Return the times; None, for good, if they are not ready."""
        self.drop()
        return self._times

    def drop(self) -> None:
        """Return the events to the pool."""
        marks, self._all, self._left = self._all, [], []
        self._marks.release(marks)

    def _look(self, reached: Callable[[TimedEvent], bool]) -> bool:
        try:
            if self._left and is_capturing():
                return False  # a query invalidates the capture of a CUDA graph
            while self._left:
                if not reached(self._left[-1].event):
                    return False
                self._left.pop()
            if self._all:
                self._times = self._read()
                self.drop()
        except Exception as error:  # noqa: BLE001  # a step is handed over without them
            self._marks.fault(error)
            self._left = []
            self.drop()
        return True

    def _read(self) -> DeviceTimes:
        forwards_ns = {slot: _between_ns(start, end) for slot, start, end in self._forwards}
        clocks: dict[int, list[NodeTimestamp]] = {}
        origins: dict[int, Mark] = {}  # per segment: elapsed times are 32-bit floats, which lose digits within minutes
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
    """Read the memory of the CUDA devices that this process uses; an allocator that raises is asked once."""

    def __init__(self) -> None:
        self.guard = Guard("device memory", limit=1)

    def read(self) -> tuple[DeviceMemory, ...]:
        """Return the memory of each device, an empty tuple if unknown. Raises nothing and does not wait."""
        if self.guard.is_off:
            return ()
        try:
            return device_memory()
        except Exception:  # noqa: BLE001  # the step is recorded without it
            self.guard.fault()
            return ()


def device_memory() -> tuple[DeviceMemory, ...]:
    """Return the memory of the CUDA devices that this process uses; does not wait.

    The peak is since the start of the program, or since the program reset it.
    """
    if not torch.cuda.is_initialized():  # other calls would initialise CUDA
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        if not has_context(index):
            continue  # some allocators would initialise the device
        stats = torch.cuda.memory_stats_as_nested_dict(index)
        if not stats or not stats["reserved_bytes"]["all"]["peak"]:
            continue
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        found.append(DeviceMemory(f"cuda:{index}", allocated["current"], reserved["current"], allocated["peak"]))
    return tuple(found)


def device_id() -> str:
    """Return the UUID of the current GPU, as NVIDIA's tools write it; empty if this process uses none."""
    try:
        if not torch.cuda.is_initialized():
            return ""
        uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    except AcceleratorError:
        return ""
    return "" if uuid is None else f"GPU-{uuid}"
