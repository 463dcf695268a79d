"""Copies numbers from a device without waiting, and reads them when the copy is done.

A CUDA device that has failed, as by an assertion in a kernel, fails every later call of the process. The program gets
that error from its own call; torchotel asks the device for nothing more, and the values stay unknown.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

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

    __slots__ = ("_buffer", "_event", "_values")

    def __init__(self, buffer: Tensor | None, event: Event | None, values: Sequence[float] = ()) -> None:
        self._values: list[float] = [*values]
        self._buffer = buffer
        self._event = event
        if event is None:
            self._read_buffer()

    def ready(self) -> bool:
        """Return whether the numbers are there, without waiting; to be asked on a training thread."""
        if self._event is not None:
            try:
                if is_capturing() or not self._event.query():  # a query would end the capture of a CUDA graph
                    return False
                self._read_buffer()
            except AcceleratorError:
                self._give_up()
        return True

    def wait(self) -> None:
        """Wait until the numbers are there, or the device has failed."""
        if self._event is not None:
            try:
                if not is_capturing():
                    self._event.synchronize()
                    self._read_buffer()
            except AcceleratorError:
                self._give_up()

    def values(self) -> list[float]:
        """Return the numbers; an empty list if they are not ready or can't be known."""
        return self._values

    def _read_buffer(self) -> None:
        if self._buffer is not None:
            self._values = [float(value) for value in self._buffer.tolist()]
        self._buffer = self._event = None

    def _give_up(self) -> None:
        keep_for_good([self._buffer, self._event])
        self._buffer = self._event = None


UNKNOWN = AsyncReadback(None, None)
"""For numbers that can't be read: meta tensors have none, and a captured CUDA graph would copy at each replay."""


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured on the current stream.

    Raises:
        torch.AcceleratorError: If the device has failed.
    """
    # On a build for CUDA without a driver the second call raises.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def keep_for_good(kept: object) -> None:
    """Keep buffers and events of a device that has failed until the process ends, also beyond the interpreter's end.

    The destructor of pinned memory asks the device, and an error in a destructor ends the process by a signal. That of
    an event prints a line.
    """
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
        scalars = [tensor.detach().reshape(()) for tensor in tensors]
        if len({scalar.dtype for scalar in scalars}) > 1:
            widest = torch.float32 if scalars[0].device.type == "mps" else torch.float64  # MPS has no float64
            scalars = [scalar.to(widest) for scalar in scalars]
        return copy_async(torch.stack(scalars))


def copy_async(values: Tensor) -> AsyncReadback:
    """Read a tensor of real numbers that torchotel has made."""
    if values.device.type == "cpu":
        return AsyncReadback(values, None)
    device = values.device
    try:
        # The allocator of pinned memory reuses no block before its copy is done.
        buffer = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
        buffer.copy_(values, non_blocking=True)
        event = torch.Event(device)
        event.record(torch.accelerator.current_stream(device))
    except RuntimeError:
        return UNKNOWN  # a device that has no streams or shares no memory
    return AsyncReadback(buffer, event)


def _can_read(tensor: Tensor) -> bool:
    """Return whether a tensor's number can be read: not that of fakes, wrapper subclasses and transforms."""
    return tensor.device.type != "meta" and is_plain(tensor) and tensor.numel() == 1 and not tensor.is_complex()
