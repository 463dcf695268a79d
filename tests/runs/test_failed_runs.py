"""Test how summary and page report an exception that ended the run: step, layer and message."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support import commands, report_runs
from support.recorded_runs import advice, recorded, train
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import torchotel
from torchotel.runs import describe, open_run, render, run_failure, summarise
from torchotel.runs.html import gather

MESSAGE = "addmm: mat1 and mat2 shapes cannot be multiplied (4x6 and 8x8)"


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Tanh(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))


def _too_narrow_at(bad: int) -> Callable[[int], torch.Tensor]:
    return lambda step: torch.rand(4, 6 if step == bad else 8)


@pytest.mark.parametrize("detail", ["all", "off"])
def test_a_forward_that_ends_the_run(tmp_path: Path, detail: str) -> None:
    """A failed training forward counts as a step, not as an evaluation; its layer is known without module spans too."""
    content = recorded(
        tmp_path, lambda: train(_net(), 30, batch=_too_narrow_at(20)), raises=RuntimeError, detail=detail
    )
    summary = content.summary
    failure = run_failure(summary, content.info)
    assert failure is not None
    assert failure._asdict() == {
        "type": "RuntimeError",
        "message": MESSAGE,
        "path": "1.0",
        "kind": "step",
        "number": 20,
        "last_step": 19,
        "phase": "",
    }
    assert (summary.steps, summary.evaluations) == (20, 0)
    text = render(summary, content.info)
    assert f"ended with  RuntimeError at step 20, in layer 1.0\n            {MESSAGE}\n" in text
    assert "the last whole step before it is 19\n" in text
    found = advice(content, "The run ended with RuntimeError at step 20")
    assert found is not None
    assert "It was raised in <code>1.0</code>" in found.text
    assert f"<code>{MESSAGE}</code>" in found.text
    assert "The last whole step before it is step 19" in found.text
    assert "evaluation" not in report_runs.head(content)


def test_a_failure_that_a_running_program_goes_on_from(tmp_path: Path) -> None:
    """The last request of a server failed, and the server continues."""
    net = _net().eval()
    with torchotel.instrument(record=tmp_path / "run", traces_exporter="none", metrics_exporter="none") as handle:
        for width in (8, 8, 6):
            with torch.no_grad(), nullcontext() if width == 8 else pytest.raises(RuntimeError):
                net(torch.rand(4, width))
        handle.flush()
        content = gather(open_run(tmp_path / "run"))
    assert run_failure(content.summary, content.info) is None
    text = render(content.summary, content.info)
    assert "ended with" not in text
    assert "first error" in text
    assert advice(content, "The run ended") is None
    assert advice(content, "1 failure, the first at evaluation 2") is not None


def test_a_forward_that_fails_at_once(tmp_path: Path) -> None:
    content = recorded(tmp_path, lambda: train(_net(), 1, batch=_too_narrow_at(0)), raises=RuntimeError)
    failure = run_failure(content.summary, content.info)
    assert failure is not None
    assert describe(failure) == "RuntimeError at step 0, in layer 1.0"
    found = advice(content, "The run ended with")
    assert found is not None
    assert "last whole step" not in found.text


def test_an_evaluation_that_ends_the_run(tmp_path: Path) -> None:
    def program() -> None:
        net = _net()
        train(net, 5)
        with torch.no_grad():
            net(torch.rand(4, 8))
            net(torch.rand(4, 6))

    content = recorded(tmp_path, program, raises=RuntimeError)
    failure = run_failure(content.summary, content.info)
    assert failure is not None
    assert describe(failure) == "RuntimeError at evaluation 1, after step 4, in layer 1.0"
    assert content.summary.evaluations == 2


@pytest.mark.parametrize("steps", [0, 5])
def test_a_request_with_gradients_on_is_no_step(tmp_path: Path, steps: int) -> None:
    """A model in evaluation mode that fails with gradients enabled counts as an evaluation, not as a step."""

    def program() -> None:
        net = _net()
        train(net, steps)
        net.eval()(torch.rand(4, 6))

    content = recorded(tmp_path, program, raises=RuntimeError)
    failure = run_failure(content.summary, content.info)
    assert failure is not None
    assert (failure.kind, failure.number, failure.last_step) == ("evaluation", 0, steps - 1 if steps else None)
    assert (content.summary.steps, content.summary.evaluations) == (steps, 1)


def test_a_backward_that_ends_the_run(tmp_path: Path) -> None:
    """A failed backward belongs to its step, and no module call raised the exception."""

    def twice(step: int, output: torch.Tensor) -> torch.Tensor:
        loss = output.exp().mean()
        if step == 3:
            loss.backward()
        return loss

    content = recorded(tmp_path, lambda: train(_net(), 5, loss=twice), raises=RuntimeError)
    failure = run_failure(content.summary, content.info)
    assert failure is not None
    assert (describe(failure), failure.last_step) == ("RuntimeError at step 3, in the backward", 2)
    found = advice(content, "The run ended with RuntimeError at step 3, in the backward")
    assert found is not None
    assert "No module's call raised it" in found.text


class NoMemory(torch.optim.SGD):
    """An optimizer that raises MemoryError at the fourth step."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.steps == 4:
            if closure is not None:
                closure()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().step(closure)


@pytest.mark.parametrize("closure", [False, True])
def test_an_optimizer_step_that_ends_the_run(tmp_path: Path, *, closure: bool) -> None:
    """A failed optimizer step is named, even if a backward ran inside it."""

    def program() -> None:
        net = _net()
        optimizer = NoMemory(net.parameters(), 0.1)
        for _ in range(5):
            if closure:
                optimizer.step(lambda: net(torch.rand(4, 8)).sum().backward())
            else:
                net(torch.rand(4, 8)).sum().backward()
                optimizer.step()

    content = recorded(tmp_path, program, raises=torch.OutOfMemoryError)
    failure = run_failure(content.summary, content.info)
    assert failure is not None
    place = "torch.OutOfMemoryError at step 3, in the optimizer's step"
    assert (describe(failure), failure.last_step) == (place, 2)
    found = advice(content, f"The run ended with {place}")
    assert found is not None
    assert "No module's call raised it" in found.text


class Disk(Dataset[torch.Tensor]):
    """A dataset that raises OSError at its end."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 9:
            raise OSError("disk gone\nsector 7")
        return torch.rand(8)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_fetch_that_ends_the_run(tmp_path: Path, workers: int) -> None:
    """A failed fetch is not an evaluation; the worker's own message is shown besides that of PyTorch."""

    def program() -> None:
        batches = iter(DataLoader(Disk(), batch_size=2, num_workers=workers))
        train(_net(), 6, batch=lambda _: next(batches))

    content = recorded(tmp_path, program, raises=OSError)
    failure = run_failure(content.summary, content.info)
    assert failure is not None
    assert describe(failure) == "OSError while fetching a batch, after step 3"
    caught = "Caught OSError in DataLoader worker process 0. OSError: "
    assert failure.message == f"{caught if workers else ''}disk gone"
    found = advice(content, "The run ended with OSError while fetching a batch, after step 3")
    assert found is not None
    assert "module" not in found.text
    assert content.summary.evaluations == 0


@pytest.mark.parametrize(("steps", "place"), [(3, "after step 2"), (0, "before the first step")])
def test_an_exception_of_the_programs_own_code(tmp_path: Path, steps: int, place: str) -> None:
    """An exception outside steps is known from the run's end, since it has no span."""

    def program() -> None:
        train(_net(), steps)
        with torch.no_grad():
            _net()(torch.rand(4, 8))
        raise ValueError("no such file")

    content = recorded(tmp_path, program, raises=ValueError)
    failure = run_failure(content.summary, content.info)
    assert failure is not None
    assert (describe(failure), failure.message) == (f"ValueError {place}", "no such file")
    assert advice(content, f"The run ended with ValueError {place}") is not None
    assert content.summary.evaluations == 1


class Stops(nn.Module):
    """A layer that raises at its last call."""

    def __init__(self, error: BaseException, calls: int) -> None:
        super().__init__()
        self.error, self.calls = error, calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls -= 1
        if not self.calls:
            raise self.error
        return x


def _failed_roots(folder: Path) -> list[tuple[str, object, object]]:
    """Return name, exception and reason of the failed roots of a run."""
    roots = [span for span in open_run(folder).spans() if span.error and not span.parent_id]
    return [(root.name, root.attributes["error.type"], root.attributes["torch.kept.reason"]) for root in roots]


@pytest.mark.parametrize("detail", ["all", "off"])
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("at", ["loss", "layer", "interrupt", "after backward"])
def test_an_exception_inside_a_step(tmp_path: Path, at: str, accumulated: int, detail: str) -> None:
    """The interrupted step fails, though no module's call raised: it is no whole step, and no evaluation."""
    error = {"layer": ValueError, "interrupt": KeyboardInterrupt}.get(at, RuntimeError)
    layers = [Stops(error(), 4 * accumulated)] if at in {"layer", "interrupt"} else []
    net = nn.Sequential(nn.Linear(8, 1), *layers)

    def program() -> None:
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for batch in range(1, 4 * accumulated + 1):
            output = net(torch.rand(4, 8))
            if at == "loss" and batch == 4 * accumulated:
                output.view(3, 5, 7)
            output.sum().backward()
            if at == "after backward" and batch == 4 * accumulated:
                output.view(3, 5, 7)
            if batch % accumulated == 0:
                optimizer.step()

    content = recorded(tmp_path, program, raises=error, detail=detail)
    summary = content.summary
    began = accumulated > 1 or at == "after backward"  # a backward has made the step a step
    root = "torch.step" if began else "torch.evaluation"
    assert _failed_roots(tmp_path / "run") == [(root, error.__name__, "error")]
    assert (summary.steps, summary.evaluations, summary.errors) == (3 + began, 0, {error.__name__: 1})
    assert (content.info["spans"]["steps"], content.info["spans"]["evaluations"]) == (3 + began, 0)
    failure = run_failure(summary, content.info)
    assert failure is not None
    layer = ", in layer 1" if layers else ""
    assert (describe(failure), failure.last_step) == (f"{error.__name__} at step 3{layer}", 2)
    assert "the last whole step before it is 2\n" in render(summary, content.info)
    assert advice(content, f"The run ended with {error.__name__} at step 3") is not None


@pytest.mark.parametrize("afterwards", ["evaluation mode", "jacrev"])
def test_an_exception_after_a_step(tmp_path: Path, afterwards: str) -> None:
    """A step whose optimizer has stepped is whole, and neither did what has returned after it fail."""

    def program() -> None:
        net = _net()
        train(net, 3)
        if afterwards == "jacrev":
            torch.func.jacrev(net)(torch.rand(4, 8))
        else:
            net.eval()(torch.rand(4, 8))
        raise ValueError("no such file")

    content = recorded(tmp_path, program, raises=ValueError)
    assert (content.summary.steps, content.summary.evaluations, content.summary.errors) == (3, 1, {})
    assert _failed_roots(tmp_path / "run") == []


def test_an_exception_inside_a_batch_of_an_evaluation(tmp_path: Path) -> None:
    def program() -> None:
        net = _net()
        train(net, 3)
        with torch.no_grad():
            for (batch,) in DataLoader(TensorDataset(torch.rand(4, 8))):
                net(batch).view(3, 5, 7)

    content = recorded(tmp_path, program, raises=RuntimeError)
    failure = run_failure(content.summary, content.info)
    assert failure is not None
    assert describe(failure) == "RuntimeError at evaluation 0, after step 2"
    assert _failed_roots(tmp_path / "run") == [("torch.evaluation", "RuntimeError", "error")]


def test_a_fetch_that_ends_the_run_inside_a_step(tmp_path: Path) -> None:
    """The fetch has recorded the exception, so the step between whose batches it was raised has no error."""

    def program() -> None:
        net = _net()
        for batch in DataLoader(Disk(), batch_size=2):
            net(batch).sum().backward()

    content = recorded(tmp_path, program, raises=OSError)
    assert content.summary.errors == {"OSError": 1}
    assert _failed_roots(tmp_path / "run") == [("torch.data", "OSError", "error")]


@pytest.mark.parametrize(("after", "text"), [(False, "KeyError at step 2"), (True, "KeyError after step 2")])
def test_an_exception_before_the_optimizer(tmp_path: Path, *, after: bool, text: str) -> None:
    """An exception between backward and optimizer belongs to that step, unless an evaluation follows it."""

    def program() -> None:
        net = _net()
        train(net, 2)
        net(torch.rand(4, 8)).sum().backward()
        if after:
            with torch.no_grad():
                [net(batch) for (batch,) in DataLoader(TensorDataset(torch.rand(4, 8)))]
        raise KeyError("accuracy")

    content = recorded(tmp_path, program, raises=KeyError)
    failure = run_failure(content.summary, content.info)
    assert failure is not None
    assert describe(failure) == text
    assert ("the last whole step before it is 1" in render(content.summary, content.info)) is not after


def test_an_exception_that_the_program_catches(tmp_path: Path) -> None:
    """An exception that the program caught did not end the run, even if nothing was recorded after it."""

    def program() -> None:
        net = _net()
        with pytest.raises(RuntimeError):
            train(net, 3, batch=_too_narrow_at(2))
        train(net, 3)
        with pytest.raises(RuntimeError):
            net(torch.rand(4, 6))

    content = recorded(tmp_path, program)
    assert run_failure(content.summary, content.info) is None
    text = render(content.summary, content.info)
    assert "errors      2 RuntimeError\nfirst error RuntimeError at step 2, in layer 1.0\n" in text
    assert (content.summary.steps, content.summary.evaluations) == (5, 0)
    found = advice(content, "2 failures, the first at step 2")
    assert found is not None
    assert "Failures in all: 2 RuntimeError" in found.text


def test_a_handler_that_calls_exit(tmp_path: Path) -> None:
    """The run file names the handled exception, not the `SystemExit`."""

    def program() -> None:
        train(nn.Linear(8, 1), 2)
        try:
            int("bad file")
        except ValueError:
            sys.exit(1)

    recorded(tmp_path, program, raises=SystemExit)
    error = open_run(tmp_path / "run").info["error"]
    assert (error["type"], error["message"]) == ("ValueError", "invalid literal for int() with base 10: 'bad file'")


def test_an_exit_below_a_handler(tmp_path: Path) -> None:
    """The cause is `SystemExit` if the program trains inside a handler, for example of a failed import."""

    def program() -> None:
        train(nn.Linear(8, 1), 2)
        sys.exit("too inaccurate")

    try:
        int("bad file")
    except ValueError:
        recorded(tmp_path, program, raises=SystemExit)
    error = open_run(tmp_path / "run").info["error"]
    assert (error["type"], error["message"]) == ("SystemExit", "too inaccurate")


def test_a_run_without_a_failure(tmp_path: Path) -> None:
    content = recorded(tmp_path, lambda: train(_net(), 3))
    assert (run_failure(content.summary, content.info), content.summary.first_failure) == (None, None)
    assert advice(content, "failure") is None
    assert advice(content, "ended") is None


@pytest.mark.parametrize("text", ["type", "full"])
def test_the_run_file_has_as_much_of_the_text_as_is_allowed(tmp_path: Path, text: str) -> None:
    content = recorded(
        tmp_path, lambda: train(_net(), 1, batch=_too_narrow_at(0)), raises=RuntimeError, exception_text=text
    )
    message = MESSAGE if text == "full" else ""
    assert content.info["error"]["message"] == message
    failure = run_failure(content.summary, content.info)
    assert failure is not None
    assert (failure.message, failure.path) == (message, "1.0")


PROGRAM = """
import torch
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(5):
    net(torch.rand(4, 6 if step == 4 else 8)).sum().backward()
    optimizer.step()
"""


@pytest.mark.program
def test_run_ends_with_the_place(tmp_path: Path) -> None:
    """`torchotel run` prints the place of the exception after the summary, before the folder of the recording."""
    (tmp_path / "train.py").write_text(PROGRAM)
    done = commands.torchotel("run", "--record", "here", "train.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "\nthe program ended with RuntimeError at step 4, in layer 0\nrecorded in here\n" in done.stdout
    run = open_run(tmp_path / "here")
    assert summarise(run.records(), run.spans()).evaluations == 0


SESSION = """
import torch, torchotel
net = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
def train(batches):
    for batch in batches:
        net(batch).sum().backward()
        optimizer.step()

1 / 0
torchotel.instrument()
train([None])
torchotel.uninstrument()
torchotel.instrument(record="run")
train(torch.rand(4, 4, 8))
raise LookupError("corrected, and the training goes on")
train(torch.rand(1, 4, 8))
{}
exit()
"""


@pytest.mark.program
@pytest.mark.parametrize(("last_line", "error"), [("", None), ("int('x')", "ValueError")])
def test_an_exception_that_an_interactive_session_printed_earlier(
    tmp_path: Path, last_line: str, error: str | None
) -> None:
    """Only an exception that was printed after the last step ends the run at the session's exit."""
    done = commands.python("-i", "-c", "", cwd=tmp_path, stdin=SESSION.format(last_line), **commands.SILENT)
    assert "ZeroDivisionError" in done.stderr
    run = open_run(tmp_path / "run")
    summary = summarise(run.records(), run.spans())
    failure = run_failure(summary, run.info)
    assert summary.steps == 5
    assert (None if failure is None else failure.type) == error
