"""What is compiled on one thread while another trains: what that one misses, and that it is told."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.recorded_training import recorded
from torch import Tensor, nn

from torchotel.capture.torch_compile import CompileHooks


class SlowCompiler:
    """A backend that takes until it is told to end."""

    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()

    def thread(self) -> threading.Thread:
        """Make a thread that compiles something."""

        def slow(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
            self.began.set()
            self.may_end.wait(10)
            return graph.forward

        compiled = torch.compile(nn.Linear(4, 4), backend=slow)  # a function: torch 2.15 pickles an object
        return threading.Thread(target=compiled, args=(torch.ones(2, 4),))


def test_another_thread_compiles_during_a_backward() -> None:
    """A backward that ends while another thread compiles has ended: the steps after it are whole."""
    compiler = SlowCompiler()
    thread = compiler.thread()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def compile_meanwhile(_: Tensor) -> None:
        thread.start()
        assert compiler.began.wait(10)

    with recorded() as run:
        for number in range(3):
            output = model(torch.ones(2, 4))
            if number == 1:
                output.register_hook(compile_meanwhile)
            output.sum().backward()
            if number == 1:
                compiler.may_end.set()
            optimizer.step()
        thread.join()
    assert len(run.steps) == 3


def test_backwards_are_seen_while_another_thread_compiles(caplog: pytest.LogCaptureFixture) -> None:
    """What another thread compiles takes the module spans of this one's steps, and neither backward nor optimizer."""
    compiler = SlowCompiler()
    thread = compiler.thread()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with recorded() as run:
        thread.start()
        assert compiler.began.wait(10)
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        compiler.may_end.set()
        thread.join()
    assert [len(step.find_all("torch.backward")) for step in run.steps] == [1, 1, 1]
    assert [len(step.find_all("torch.optimizer.step")) for step in run.steps] == [1, 1, 1]
    (told,) = [record.getMessage() for record in caplog.records if record.name == "torchotel"]
    assert "hooks are out meanwhile" in told


def test_other_threads_build_tuples_during_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for compiled modules keeps no reference to a tuple that another thread builds: it could not grow."""
    began, go_on, built = threading.Event(), threading.Event(), list[object]()

    def numbers() -> Iterator[int]:
        began.set()
        go_on.wait(10)
        yield from range(3)

    thread = threading.Thread(target=lambda: built.append(tuple(numbers())))
    wrap = CompileHooks._wrap_if_compiled

    def wrap_meanwhile(hooks: CompileHooks, module: nn.Module) -> None:
        go_on.set()
        thread.join()
        wrap(hooks, module)

    monkeypatch.setattr(CompileHooks, "_wrap_if_compiled", wrap_meanwhile)
    model = nn.Linear(4, 4)
    model.compile(backend="eager")
    model(torch.ones(2, 4))
    thread.start()
    assert began.wait(10)
    with recorded():
        assert go_on.is_set()
    assert built == [(0, 1, 2)]


class Waiting(nn.Linear):
    """Has another thread compile something in the midst of its forward."""

    def forward(self, x: Tensor) -> Tensor:
        compiler = SlowCompiler()
        thread = compiler.thread()
        thread.start()
        assert compiler.began.wait(10)
        compiler.may_end.set()
        thread.join()
        return super().forward(x)


def test_tells_once_of_what_is_compiled_beside_a_forward(caplog: pytest.LogCaptureFixture) -> None:
    """The spans of such a forward are not to be relied on, and who serves can compile before."""
    with recorded():
        for _ in range(2):
            Waiting(4, 4)(torch.ones(2, 4))
    told = [record.getMessage() for record in caplog.records if record.name == "torchotel"]
    assert len(told) == 1
    assert "compiled" in told[0]


def test_does_not_tell_of_what_a_thread_compiles_for_itself(caplog: pytest.LogCaptureFixture) -> None:
    """Alone, it misses nothing."""
    with recorded():
        torch.compile(nn.Linear(4, 4), backend="eager")(torch.ones(2, 4))
    assert [record for record in caplog.records if record.name == "torchotel"] == []
