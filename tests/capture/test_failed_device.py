"""A CUDA device that fails: the program's exception is the only one, and the steps before it are recorded."""

import gc
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from support.commands import python
from torch import AcceleratorError, Tensor, nn

from torchotel.capture import async_readback
from torchotel.capture.async_readback import AsyncReadback, read_async
from torchotel.runs import open_run, run_failure, summarise
from torchotel.testing import capture


class Failed:
    """An event of a device that has failed."""

    def query(self) -> NoReturn:
        raise AcceleratorError("CUDA error: device-side assert triggered")

    def synchronize(self) -> None:
        self.query()


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function after which every question to CUDA raises, as after an assertion in a kernel."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return lambda: monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", Failed().query)


@pytest.mark.parametrize("ask", [AsyncReadback.ready, AsyncReadback.wait])
def test_values_stay_unknown(ask: Callable[[AsyncReadback], object], fail: Callable[[], None]) -> None:
    """The first call that sees the failure may be one of torchotel's; a step does not wait for its values any more."""
    fail()
    readback = AsyncReadback(torch.zeros(2), Failed())
    ask(readback)
    assert readback.ready()
    assert readback.values() == []


@pytest.mark.usefixtures("fail")
def test_other_errors_of_cuda_are_not_hidden() -> None:
    """A call of torchotel may be wrong; the device works on."""
    with pytest.raises(AcceleratorError):
        AsyncReadback(torch.zeros(2), Failed()).ready()


class Device:
    """Stands for a device that copies into pinned memory: its only event, and a count of the buffers that were made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.has_failed, self.made = True, False, list[weakref.ref[Tensor]]()
        monkeypatch.setattr(async_readback, "_free", defaultdict(list))
        monkeypatch.setattr(async_readback, "_running", deque())
        monkeypatch.setattr(torch, "Event", lambda _: self)
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: None)
        self._empty = torch.empty
        monkeypatch.setattr(torch, "empty", self._make)

    def _make(self, *size: int, pin_memory: bool, **options: Any) -> Tensor:
        assert pin_memory
        buffer = self._empty(*size, **options)
        self.made.append(weakref.ref(buffer))
        return buffer

    def record(self, _: object) -> None:
        self.query()

    def query(self) -> bool:
        if self.has_failed:
            raise AcceleratorError("CUDA error: device-side assert triggered")
        return self.reached

    def copy(self, *values: float) -> AsyncReadback:
        return async_readback._start_copy(torch.tensor(values))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def test_buffers_that_were_read_are_used_again(device: Device) -> None:
    """Also for fewer values; one that was not read is not."""
    unread = device.copy(1, 2, 3)
    for number in range(5):
        readback = device.copy(number, number, number, number)
        assert readback.ready()
        assert readback.values() == [number] * 4
    assert len(device.made) == 2
    assert unread.ready()
    assert unread.values() == [1, 2, 3]


def test_a_buffer_that_nobody_reads_is_free_after_its_copy(device: Device) -> None:
    """A step that waits too long is handed over without its values."""
    device.reached = False
    device.copy(1)
    device.copy(2)
    assert len(device.made) == 2
    device.reached = True
    device.copy(3)
    assert len(device.made) == 2


def test_no_buffer_of_a_failed_device_is_freed(device: Device) -> None:
    """The destructor of pinned memory would end the process, whenever the device failed."""
    device.reached = False
    waiting = [device.copy(1), device.copy(2)]
    waiting.pop()
    device.reached, device.has_failed = True, True
    for _ in range(2):
        with pytest.raises(AcceleratorError):
            device.copy(3)
    del waiting
    gc.collect()
    assert [buffer() is not None for buffer in device.made] == [True, True]


def test_a_device_that_fails_amid_a_copy(device: Device) -> None:
    """The copy has begun, and its event cannot be recorded."""
    device.has_failed = True
    with pytest.raises(AcceleratorError):
        device.copy(1)
    gc.collect()
    assert [buffer() is not None for buffer in device.made] == [True]


def test_nothing_is_computed(fail: Callable[[], None]) -> None:
    """Neither norms nor losses are read, and no error is logged."""
    fail()
    assert read_async([torch.ones(1), torch.ones(1)]).values() == []
    with capture() as captured:
        nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    assert len(captured.steps) == 1
    assert captured.handle.stats()["internal_errors"] == 0


PROGRAM = """
import torch, torchotel
from torch import nn
torchotel.instrument(record="run", detail="all", prometheus_port=0, traces_exporter="none")
model = nn.Sequential(nn.Embedding(100, 64), nn.Flatten(), nn.Linear(64 * 8, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(10):
    optimizer.zero_grad()
    rows = torch.randint(100, (16, 8), device="cuda")
    if step == 6:
        rows[0, 0] = 1000
    loss = model(rows).square().mean()
    torchotel.log(loss=loss.detach())
    loss.backward()
    optimizer.step()
    torch.cuda.synchronize()
"""


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_assertion_in_a_kernel(tmp_path: Path) -> None:
    """The program ends with its own exception, not by a signal, and its last step says why."""
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = python("program.py", cwd=tmp_path)
    assert ended.returncode == 1, ended.stderr
    assert "device-side assert triggered" in ended.stderr
    assert "internal error" not in ended.stderr
    assert "~CUDAEvent" not in ended.stderr
    run = open_run(tmp_path / "run")
    summary = summarise(run.records(), run.spans())
    failure = run_failure(summary, run.info)
    assert failure is not None
    assert failure.type == "torch.AcceleratorError"
    assert summary.steps == 7
