"""Copies numbers from a device without waiting, and reads them when the copy is done.

After a CUDA device has failed, as by an assertion in a kernel, each call of it raises. The program's own call raises
the error, too, so torchotel logs nothing; the values stay unknown.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

import torch
from torch import AcceleratorError, Tensor

from torchotel.capture.torch_internals import is_plain, modes_are_on, seen_by_modes, unseen


class Event(Protocol):
    """An event of a device's stream after the copy."""

    def query(self) -> bool:
        """Return whether the stream has reached the event, without waiting."""

    def synchronize(self) -> None:
        """Wait until the stream reaches the event."""


class AsyncReadback:
    """Numbers that a device copies to the host; holds no tensor of the program and no graph.

    Args:
        buffer: The target of the copy; None for no copy.
        event: Reached when the copy is done; None if it is done.
        values: Numbers that are known already.
    """

    __slots__ = ("__weakref__", "_buffer", "_event", "_values")

    def __init__(self, buffer: Tensor | None, event: Event | None, values: Sequence[float] = ()) -> None:
        self._values: list[float] = [*values]
        self._buffer = buffer
        self._event = event
        if event is None:
            self._read_buffer()
            self._buffer = None

    @property
    def is_waiting(self) -> bool:
        """Whether the buffer has not been read."""
        return self._event is not None

    def ready(self) -> bool:
        """Return whether the numbers are there, without waiting; to be asked on a training thread."""
        if self._event is not None:
            with unless_failed():
                if is_capturing() or not self._event.query():  # a query would end the capture of a CUDA graph
                    return False
                self._read_buffer()
            self._buffer = self._event = None  # also on a device that has failed
        return True

    def wait(self) -> None:
        """Wait until the numbers are there, or the device has failed."""
        if self._event is not None:
            with unless_failed():
                if is_capturing():
                    return
                self._event.synchronize()
                self._read_buffer()
            self._buffer = self._event = None  # also on a device that has failed

    def values(self) -> list[float]:
        """Return the numbers; an empty list if they are not ready or can't be known."""
        return self._values

    def _read_buffer(self) -> None:
        if self._buffer is not None:
            self._values = [float(value) for value in self._buffer.tolist()]


UNKNOWN = AsyncReadback(None, None)
"""For numbers that can't be read: meta tensors have none, and a captured CUDA graph would copy at each replay."""


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured on the current stream.

    Raises:
        torch.AcceleratorError: The device has failed.
    """
    # On a build for CUDA without a driver the second call raises.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def has_failed() -> bool:
    """Return whether the current CUDA device has failed."""
    try:
        is_capturing()
    except AcceleratorError:
        return True
    return False


@contextmanager
def unless_failed() -> Iterator[None]:
    """Leave the block without an exception if the CUDA device has failed."""
    try:
        yield
    except AcceleratorError:
        if not has_failed():
            raise


def keep_for_good(kept: object) -> None:
    """Keep an object until the process ends, also beyond the interpreter's end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def can_compute() -> bool:
    """Return whether torchotel may compute.

    It may not while a CUDA graph is captured or a mode would see the operations, nor on a device that has failed.
    """
    try:
        return not (is_capturing() or seen_by_modes())
    except AcceleratorError:
        return False


def read_async(tensors: Sequence[Tensor]) -> AsyncReadback:
    """Read tensors of one real element each, all on one device; the program may change them right after.

    Tensors on the CPU are read at once. Others are read by one asynchronous copy.
    """
    if len(tensors) == 1 and not modes_are_on():
        (tensor,) = tensors
        if tensor.is_cpu and _can_read(tensor):  # the common case, five times as fast
            return AsyncReadback(None, None, [float(tensor.item())])
    with unseen():
        if not tensors or not can_compute() or not all(_can_read(tensor) for tensor in tensors):
            return UNKNOWN
        with unless_failed():
            scalars = [tensor.detach().reshape(()) for tensor in tensors]
            if len({scalar.dtype for scalar in scalars}) > 1:
                widest = torch.float32 if scalars[0].device.type == "mps" else torch.float64  # MPS has no float64
                scalars = [scalar.to(widest) for scalar in scalars]
            return copy_async(torch.stack(scalars))
    return UNKNOWN


Kind: TypeAlias = tuple[torch.device, torch.dtype, int]
"""The key of a pinned buffer: the device that copies into it, dtype, and capacity."""
Copy: TypeAlias = tuple[Kind, Tensor, Any, "weakref.ref[AsyncReadback]"]
"""A copy that may run: its buffer, the event after it, and the readback, which may be gone without having read it."""

_free: defaultdict[Kind, list[tuple[Tensor, Any]]] = defaultdict(list)
_running: deque[Copy] = deque()
# Pinned memory is used again and never freed: its destructor calls the device, and if the device has failed, the error
# ends the process by a signal (torch 2.11).
keep_for_good([_free, _running])


def copy_async(values: Tensor) -> AsyncReadback:
    """Read a tensor of real numbers that torchotel has made."""
    if values.device.type == "cpu":
        return AsyncReadback(values, None)
    try:
        with unless_failed():
            return _start_copy(values)
    except RuntimeError:
        pass  # a device that has no streams or shares no memory
    return UNKNOWN


def _start_copy(values: Tensor) -> AsyncReadback:
    _reclaim()
    count = values.numel()
    kind = values.device, values.dtype, 1 << (count - 1).bit_length()
    try:
        pinned, event = _free[kind].pop()
    except IndexError:
        with torch.inference_mode(mode=False):  # else the buffer could not be used outside of the mode
            pinned = torch.empty(kind[2], dtype=values.dtype, device="cpu", pin_memory=True)
        event = torch.Event(values.device)
    buffer = pinned[:count]
    readback = AsyncReadback(buffer, event)
    _running.append((kind, pinned, event, weakref.ref(readback)))  # first, since the next lines may raise
    buffer.copy_(values.reshape(-1), non_blocking=True)
    event.record(torch.accelerator.current_stream(values.device))
    return readback


def _reclaim() -> None:
    """Free the buffers that nothing reads any more, when their copy is done."""
    for _ in range(len(_running)):
        try:
            copy = _running.popleft()
        except IndexError:
            return  # another thread has reclaimed it
        kind, pinned, event, reference = copy
        readback = reference()
        is_unused = readback is None or not readback.is_waiting
        try:
            is_done = is_unused and event.query()
        except AcceleratorError:
            _running.append(copy)
            raise
        if is_done:
            _free[kind].append((pinned, event))
        else:
            _running.append(copy)


def _can_read(tensor: Tensor) -> bool:
    """Return whether a tensor's number can be read: not that of fakes, wrapper subclasses and transforms."""
    return tensor.device.type != "meta" and is_plain(tensor) and tensor.numel() == 1 and not tensor.is_complex()
