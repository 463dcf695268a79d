"""A CUDA device that fails: the program's exception is the only one, and the steps before it are recorded."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from support.commands import python
from torch import AcceleratorError, nn

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
def failed_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every question to CUDA raise, as it does after an assertion in a kernel."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", Failed().query)


@pytest.mark.parametrize("ask", [AsyncReadback.ready, AsyncReadback.wait])
def test_values_stay_unknown(ask: Callable[[AsyncReadback], object]) -> None:
    """The first call that sees the failure may be one of torchotel's; a step does not wait for its values any more."""
    readback = AsyncReadback(torch.zeros(2), Failed())
    ask(readback)
    assert readback.ready()
    assert readback.values() == []


@pytest.mark.usefixtures("failed_device")
def test_buffers_outlive_their_readback() -> None:
    """The destructor of pinned memory would end the process."""
    buffer, event = torch.zeros(2), Failed()
    alive = weakref.ref(event)
    readback = AsyncReadback(buffer, event)
    readback.wait()
    del readback, event
    gc.collect()
    assert alive() is not None


@pytest.mark.usefixtures("failed_device")
def test_nothing_is_computed() -> None:
    """Neither norms nor losses are read, and no error is logged."""
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
