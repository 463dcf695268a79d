"""`shutdown()` while something runs that ends after it, or under what another library has put over our patches."""

import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.recorded_training import recorded
from support.single_step_training import train
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.utils.data import DataLoader, Dataset

import torchotel
from torchotel.capture.gradient_norms import Gradients
from torchotel.capture.hook_manager import ModuleHooks
from torchotel.capture.recorder import Capture
from torchotel.sampling.detail import Detail

ROW = torch.ones(2, 4)


def hooks() -> dict[str, int]:
    """Count torch's global module hooks."""
    return {name: len(value) for name, value in vars(nn_module).items() if name.endswith("hooks") and value}


class Ending(nn.Module):
    """Ends the recording in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        torchotel.uninstrument()
        return x * 2


class EndingDataset(Dataset[Tensor]):
    """Ends the recording where its second sample is read."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Tensor:
        if index == 1:
            torchotel.uninstrument()
        return ROW[0]


def in_forward() -> None:
    train(nn.Sequential(nn.Linear(4, 4), Ending(), nn.Linear(4, 4)), ROW)


def in_backward() -> None:
    output = nn.Linear(4, 4)(ROW)
    output.register_hook(lambda _: torchotel.uninstrument())
    output.sum().backward()


def in_fetch() -> None:
    for batch in DataLoader(EndingDataset()):
        nn.Linear(4, 4)(batch)


def in_optimizer_step() -> None:
    class EndingOptimizer(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]  # SGD's is overloaded
            torchotel.uninstrument()

    model = nn.Linear(4, 4)
    model(ROW).sum().backward()
    EndingOptimizer(model.parameters(), 0.1).step()


@pytest.mark.parametrize("detail", ["all", "off"])
@pytest.mark.parametrize("program", [in_forward, in_backward, in_fetch, in_optimizer_step])
def test_nothing_comes_back_after_shutdown(program: Callable[[], None], detail: str) -> None:
    """What was running when it was shut down ends without putting a hook in, and so does what runs later."""
    before = hooks()
    with recorded(detail):
        train(nn.Linear(4, 4), ROW, steps=2)
        program()
        assert hooks() == before
        train(nn.Linear(4, 4), ROW, steps=2)
        assert hooks() == before


def test_a_patch_over_ours_brings_nothing_back() -> None:
    """Where another library keeps our wrapper in its own, the wrapper is idle after `shutdown()`."""
    before = hooks()
    autograd = vars(torch.autograd)
    original = autograd["_engine_run_backward"]
    try:
        with recorded():
            ours = autograd["_engine_run_backward"]
            autograd["_engine_run_backward"] = partial(ours)
            torchotel.uninstrument()
            train(nn.Linear(4, 4), ROW, steps=2)
            assert hooks() == before
    finally:
        autograd["_engine_run_backward"] = original


@pytest.mark.usefixtures("quick_switches")
def test_forwards_end_while_other_threads_begin_theirs() -> None:
    """As in a server that has a thread for each request: which threads forward is looked up at each end."""
    capture = Capture(lambda _: None, Detail("off"))
    capture.install()

    def request() -> None:
        model = nn.Linear(2, 2)
        with torch.no_grad():
            for _ in range(3):
                model(torch.ones(1, 2))

    try:
        for _ in range(20):
            threads = [threading.Thread(target=request) for _ in range(50)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        capture.uninstall()
        capture.end()
    assert capture.guard.faults == 0


@pytest.mark.usefixtures("quick_switches")
def test_hooks_are_put_in_once_by_several_threads() -> None:
    """Threads whose detailed steps begin and end at the same time leave no hook behind."""
    before = hooks()
    capture, module_hooks = Capture(lambda _: None, Detail("off")), ModuleHooks()
    module_hooks.install(*[lambda *_: None] * 4)

    def toggle() -> None:
        thread = capture.current_thread.state
        for number in range(5000):
            module_hooks.set_detailed(thread, detailed=number % 2 == 0)
            module_hooks.arm()
            module_hooks.disarm()

    threads = [threading.Thread(target=toggle) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    module_hooks.remove()
    assert hooks() == before


@pytest.mark.usefixtures("quick_switches")
def test_flush_while_threads_come_and_go() -> None:
    """`flush()` raises nothing where other threads begin and end meanwhile, and none is handed over twice."""
    with recorded("off") as run:
        for _ in range(20):
            threads = [threading.Thread(target=nn.Linear(4, 4), args=(ROW,)) for _ in range(20)]
            for thread in threads:
                thread.start()
            run.handle.flush(0)
            for thread in threads:
                thread.join()
    assert 0 < len(run.evaluations) <= 400  # a forward that begins while another thread's first runs is not seen


@pytest.mark.parametrize("reads_before", [0, 1], ids=["after the backward", "before clipping"])
def test_while_another_thread_reads_norms(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reads_before: int
) -> None:
    """A thread that reads the norms of its step when the recording ends meets no internal error."""
    read, reads = Gradients.read, itertools.count()

    def ending_read(*arguments: Any) -> Any:
        if next(reads) == reads_before:
            ending = threading.Thread(target=torchotel.uninstrument)
            ending.start()
            ending.join()
        return read(*arguments)

    model = nn.Linear(4, 4)
    with torchotel.instrument(detail="all", traces_exporter="none", prometheus_port=None):
        monkeypatch.setattr(Gradients, "read", ending_read)
        model(ROW).sum().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(2)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert next(reads) > reads_before
    assert not caplog.records
