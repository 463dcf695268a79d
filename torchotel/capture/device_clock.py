"""The clocks of devices: CUDA's, or what stands for them in a test."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


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
