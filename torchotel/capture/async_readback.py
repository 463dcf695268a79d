"""Numbers on their way from a device: copied without waiting, read when they have come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from torchotel.capture.torch_internals import is_plain, modes_are_on, seen_by_modes, unseen


class Event(Protocol):
    """What a device's stream reaches once the copy is done."""

    def query(self) -> bool:
        """Tell whether it was reached, without waiting."""

    def synchronize(self) -> None:
        """Wait for it."""


class AsyncReadback:
    """Numbers that a device copies to the host; it holds no tensor of the user's and no graph.

    Args:
        buffer: Where they arrive; None: nowhere.
        event: Reached when they have; None: they have.
        values: What is there already.
    """

    __slots__ = ("_buffer", "_event", "_values")

    def __init__(self, buffer: Tensor | None, event: Event | None, values: Sequence[float] = ()) -> None:
        self._values: list[float] = [*values]
        self._buffer = buffer
        self._event = event
        if event is None:
            self._read_buffer()

    def ready(self) -> bool:
        """Tell whether the numbers are there, without waiting; to be asked on a training thread."""
        if self._event is not None:
            if is_capturing() or not self._event.query():  # a query would end the capture of a CUDA graph
                return False
            self._read_buffer()
        return True

    def wait(self) -> None:
        """Wait until the numbers are there."""
        if self._event is not None and not is_capturing():
            self._event.synchronize()
            self._read_buffer()

    def values(self) -> list[float]:
        """Return the numbers; none where they are not ready, or can't be known."""
        return self._values

    def _read_buffer(self) -> None:
        if self._buffer is not None:
            self._values = [float(value) for value in self._buffer.tolist()]
        self._buffer = self._event = None


UNKNOWN = AsyncReadback(None, None)
"""Of numbers that can't be read: there is no value on meta, and a graph under capture would copy at each replay."""


def is_capturing() -> bool:
    """Tell whether a CUDA graph is being captured on the current stream."""
    # On a build for CUDA without a driver the second call raises.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def can_compute() -> bool:
    """Tell whether something may be computed on the side: not while a graph is captured or a mode would see it."""
    return not (is_capturing() or seen_by_modes())


def read_async(tensors: Sequence[Tensor]) -> AsyncReadback:
    """Read tensors of one real element each, all of one device; the user may change them right after.

    On the CPU they are read at once. Elsewhere they travel in one copy, which nothing waits for.
    """
    if len(tensors) == 1 and not modes_are_on():
        (tensor,) = tensors
        if tensor.is_cpu and _can_read(tensor):  # the common case, at a fifth of the price
            return AsyncReadback(None, None, [float(tensor.item())])
    with unseen():
        if not tensors or not can_compute() or not all(_can_read(tensor) for tensor in tensors):
            return UNKNOWN
        scalars = [tensor.detach().reshape(()) for tensor in tensors]
        if len({scalar.dtype for scalar in scalars}) > 1:
            widest = torch.float32 if scalars[0].device.type == "mps" else torch.float64  # which Apple's have not
            scalars = [scalar.to(widest) for scalar in scalars]
        return copy_async(torch.stack(scalars))


def copy_async(values: Tensor) -> AsyncReadback:
    """Read a tensor of real numbers that is ours."""
    if values.device.type == "cpu":
        return AsyncReadback(values, None)
    device = values.device
    try:
        # The allocator of pinned memory keeps its blocks, and gives none out again before its copy is done.
        buffer = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
        buffer.copy_(values, non_blocking=True)
        event = torch.Event(device)
        event.record(torch.accelerator.current_stream(device))
    except RuntimeError:
        return UNKNOWN  # a device that has no streams or shares no memory
    return AsyncReadback(buffer, event)


def _can_read(tensor: Tensor) -> bool:
    """Tell whether a tensor has a number of its own: those of fakes, wrappers and transforms can't be read here."""
    return tensor.device.type != "meta" and is_plain(tensor) and tensor.numel() == 1 and not tensor.is_complex()
