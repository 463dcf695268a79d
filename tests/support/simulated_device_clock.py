"""A device of the tests' own: a clock that modules move, and events that are reached when we say so."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchotel.capture.cuda import TimedEvent

MS = 1_000_000


class Event:
    """A moment of the device's only stream."""

    def __init__(self, clock: DeviceClock) -> None:
        self.clock = clock
        self.time_ns: int | None = None

    def query(self) -> bool:
        self.clock.queries += 1
        return self.clock.reached

    def synchronize(self) -> None:
        self.clock.waits += 1
        self.clock.reached = True

    def elapsed_time(self, end_event: Event) -> float:
        if not self.clock.reached or self.time_ns is None or end_event.time_ns is None:
            raise RuntimeError("device not ready")
        return (end_event.time_ns - self.time_ns) / MS


class DeviceClock:
    """Stands for CUDA's: tensors on the CPU count as on its device, and time goes on only where a module says so."""

    def __init__(self) -> None:
        self.pools: dict[int, list[TimedEvent]] = {}
        self.now_ns = 0
        self.reached = True
        self.running = True
        self.queries = self.waits = self.made = 0
        self.broken = False

    def is_running(self) -> bool:
        return self.running

    def device_of(self, tensor: Tensor) -> int | None:
        return 0 if tensor.device.type == "cpu" else None

    def current(self) -> int:
        return 0

    def new_event(self) -> Event:
        self.made += 1
        return Event(self)

    def record(self, event: Event, device: int) -> None:
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        assert device == 0
        event.time_ns = self.now_ns


class _Takes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Layer) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)  # so that a recomputation comes here before it ends early
        layer.clock.now_ns += layer.forward_ns
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.layer.clock.now_ns += ctx.layer.backward_ns
        return grads[0] * 2, None


class Layer(nn.Module):
    """One operation that takes the device as long as it says."""

    def __init__(self, clock: DeviceClock, forward_ms: int, backward_ms: int) -> None:
        super().__init__()
        self.clock, self.forward_ns, self.backward_ns = clock, forward_ms * MS, backward_ms * MS
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return _Takes.apply(x * self.weight, self)  # type: ignore[no-any-return]  # torch gives `apply` no type


def net(clock: DeviceClock) -> nn.Sequential:
    """Give a model of 3 + 5 ms forward, and 20 + 7 ms backward."""
    return nn.Sequential(Layer(clock, 3, 7), Layer(clock, 5, 20))
