"""A step is handed over whatever becomes of the readings that go with it."""

from typing import Any

import pytest
import torch
from support.gradient_norm_training import Recorded, net, trained
from torch import Tensor, nn

import torchotel
from torchotel.capture import cuda
from torchotel.capture.recorder import Capture
from torchotel.sampling.detail import Detail

STEPS = 12  # more than a guard lets pass


class Uncounted:
    """A device with an allocator of the user's, which keeps no count."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[int] = []
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", self.count)
        monkeypatch.setattr(cuda, "has_context", lambda index: index == 1)

    def count(self, index: int) -> dict[str, Any]:
        self.asked.append(index)
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")


class Shy(dict[str, Any]):
    """A group of parameters that does not say how fast they learn."""

    def get(self, key: str, default: Any = None) -> Any:
        if key == "lr":
            raise LookupError("not telling")
        return super().get(key, default)


def test_an_allocator_that_keeps_no_count(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It is asked once, on the device that is used, and every step is there all the same."""
    device = Uncounted(monkeypatch)
    recorded = Recorded()
    capture = Capture(recorded.handed.append, Detail("off"))
    capture.install()
    trained(net(), steps=STEPS)
    capture.uninstall()
    capture.end()
    assert device.asked == [1]
    assert [step.number for step in recorded.steps] == list(range(STEPS))
    assert (capture.guard.faults, capture.memory.guard.faults) == (0, 1)
    assert "getDeviceStats" in caplog.text


def test_an_optimizer_that_does_not_tell_its_rate() -> None:
    """Its steps are there without one, and what it raised is counted."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], 0.1)
    optimizer.param_groups[0] = Shy(optimizer.param_groups[0])
    handle = torchotel.instrument(traces_exporter="none", metrics_exporter="none")
    try:
        for _ in range(STEPS):
            loss: Tensor = parameter.square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        handle.shutdown()
    assert handle.stats()["steps"] == STEPS
    assert handle.stats()["internal_errors"] == 10
