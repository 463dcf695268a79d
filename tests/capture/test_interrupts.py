"""Interrupts skip PyTorch's hooks: what they leave open is closed later, and nothing stays on the user's modules."""

import copy
import io
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Literal

import pytest
import torch
from support.failing_modules import GOOD_BACKWARD, GOOD_FORWARD, ROWS, FailsOnce, estimated, fail_then_train, failing
from support.recorded_training import recorded
from support.single_step_training import PHASES_ONLY, Model, only_step, step_tree, train
from torch import Tensor, nn

from torchotel._handle import Handle
from torchotel.testing import capture


def hooks_on(model: nn.Module) -> int:
    return len(model._forward_hooks) + len(model._forward_hooks_always_called)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit()], ids=["interrupt", "exit"])
def test_interrupt_in_forward(error: BaseException) -> None:
    """Open calls are closed at the next event with an estimated end; the next forward stands beside them."""
    step = only_step(fail_then_train(failing(FailsOnce(error)), "all", type(error)))
    cut = ("forward Model", ["forward a", ("forward deep", ["forward deep.0"])])
    assert step.tree() == step_tree([cut, GOOD_FORWARD], [GOOD_BACKWARD])
    assert estimated(step) == ["forward Model", "forward deep", "forward deep.0"]
    assert not any(seen.failed for seen in step.walk())


def test_interrupt_caught_in_forward() -> None:
    """Where an outer forward catches an interrupt, the call that it cut ends before the next one begins."""

    def catching(model: Any, x: Tensor) -> Any:
        with suppress(KeyboardInterrupt):
            x = model.fails(x)
        return model.a(x)

    with recorded() as run:
        train(Model(catching, fails=FailsOnce(KeyboardInterrupt())), ROWS, steps=2)
    expected = step_tree([("forward Model", ["forward fails", "forward a"])], [("backward Model", ["backward a"])])
    assert [step.tree() for step in run.steps] == [expected] * 2
    assert [estimated(step) for step in run.steps] == [["forward fails"], []]


@pytest.mark.parametrize("other", ["another model", "a part"])
def test_another_module_after_an_interrupt(other: str) -> None:
    """What is called after an interrupt stands beside the calls that it cut, whichever module it is."""
    model = failing(FailsOnce(KeyboardInterrupt()))
    called = {"another model": Model(lambda m, x: m.a(x)), "a part": model.deep}[other]
    assert isinstance(called, nn.Module)
    with recorded() as run:
        with pytest.raises(KeyboardInterrupt):
            model(ROWS)
        called(ROWS.requires_grad_()).sum().backward()
    forward = only_step(run).find("torch.forward")
    cut = ("forward Model", ["forward a", ("forward deep", ["forward deep.0"])])
    after = {"another model": ("forward Model", ["forward a"]), "a part": ("forward deep", ["forward deep.0"])}[other]
    assert forward.tree() == ("torch.forward", [cut, after])


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt()], ids=["exception", "interrupt"])
def test_exit_hook_goes_after_a_failure(error: BaseException) -> None:
    """The one hook on the outermost module is gone with the next event, and the step is good."""
    model = failing(FailsOnce(error))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with recorded("off") as run:
        with pytest.raises(type(error)):
            model(ROWS)
        optimizer.zero_grad()
        loss = model(ROWS).sum()
        assert hooks_on(model) == 0
        loss.backward()
        optimizer.step()
    assert only_step(run).tree() == PHASES_ONLY


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt()], ids=["exception", "interrupt"])
def test_model_can_be_saved_after_a_failure(error: BaseException) -> None:
    """A model can be pickled and copied where its forward failed, though the hook of that call is in it still."""
    model = nn.Sequential(nn.Linear(4, 4), FailsOnce(error))
    with recorded("off"):
        with pytest.raises(type(error)):
            model(ROWS)
        file = io.BytesIO()
        torch.save(model, file)
        copied = copy.deepcopy(model)
        expected = model(ROWS)
    file.seek(0)
    assert torch.equal(copied(ROWS), expected)
    assert torch.equal(torch.load(file, weights_only=False)(ROWS), expected)


def test_exit_hook_goes_at_shutdown() -> None:
    """An interrupt that nothing follows leaves no hook on the module after `shutdown()`."""
    model = failing(FailsOnce(KeyboardInterrupt()))
    with recorded("off"), pytest.raises(KeyboardInterrupt):
        model(ROWS)
    assert hooks_on(model) == 0


def lines_of_a_step(train_once: Callable[[], None]) -> list[tuple[str, int]]:
    """Return the lines of torchotel's capture that run on this thread in a step."""
    lines: dict[tuple[str, int], None] = {}
    trace_lines(train_once, lines.setdefault)
    return [*lines]


def trace_lines(train_once: Callable[[], None], see: Callable[[tuple[str, int]], None]) -> None:
    """Call a function with each line of torchotel's capture that runs."""

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if "/torchotel/capture/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            see((frame.f_code.co_filename, frame.f_lineno))
        return trace

    sys.settrace(trace)
    try:
        train_once()
    finally:
        sys.settrace(None)


def short_training() -> Callable[[], None]:
    """Return a function that runs a step."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)

    def train_once() -> None:
        optimizer.zero_grad()
        model(ROWS).mean().backward()
        optimizer.step()

    return train_once


def test_recording_continues_after_an_interrupt_in_a_hook() -> None:
    """Ctrl-C may come at any line of the hooks; only the step that it interrupts, or the one before it, is lost."""
    train_once = short_training()
    with capture(detail="off", gradient_norms=True):
        for _ in range(2):
            train_once()
        lines = lines_of_a_step(train_once)
    assert len(lines) > 200
    for chosen in lines[::3]:
        with capture(detail="off", gradient_norms=True) as captured:
            train_once()

            def interrupt(line: tuple[str, int], chosen: tuple[str, int] = chosen) -> None:
                if line == chosen:
                    raise KeyboardInterrupt

            with suppress(KeyboardInterrupt), torch.enable_grad():
                trace_lines(train_once, interrupt)
            for _ in range(4):
                train_once()
        assert len(captured.steps) >= 4, chosen
        assert captured.handle.stats()["internal_errors"] == 0, chosen


@pytest.mark.parametrize("detail", ["off", "all"])
def test_a_flush_in_a_hook(detail: Literal["off", "all"]) -> None:
    """A signal handler may flush at any line of the hooks: each step is recorded, with its phases."""
    train_once = short_training()
    with capture(detail=detail, gradient_norms=True):
        train_once()
        lines = lines_of_a_step(train_once)
    for chosen in lines[::4]:
        with capture(detail=detail, gradient_norms=True) as captured:

            def flush(
                line: tuple[str, int], handle: Handle = captured.handle, chosen: tuple[str, int] = chosen
            ) -> None:
                if line == chosen:
                    sys.settrace(None)
                    handle.flush(10)

            trace_lines(train_once, flush)
            train_once()
        phases = [[child.name for child in step.children] for step in captured.steps]
        assert [names[-3:] for names in phases] == [["torch.forward", "torch.backward", "torch.optimizer.step"]] * 2, (
            chosen
        )
        assert not captured.evaluations, chosen
        assert captured.handle.stats()["internal_errors"] == 0, chosen
