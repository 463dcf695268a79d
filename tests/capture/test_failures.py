"""What fails in the user's program is seen, what fails in ours is not, and the next step is good either way."""

from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from support.failing_modules import GOOD_BACKWARD, GOOD_FORWARD, ROWS, FailsOnce, estimated, fail_then_train, failing
from support.recorded_training import Seen, recorded
from support.single_step_training import PHASES_ONLY, Model, only_step, step_tree, train
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.data import DataLoader, Dataset
from torch.utils.hooks import RemovableHandle

import torchotel

both = pytest.mark.parametrize("detail", ["all", "off"])


class RaisesInBackward(torch.autograd.Function):
    """Raises what it is given when its backward runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: BaseException) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ctx.error


class BackwardFailsOnce(FailsOnce):
    """Its first call has a backward that raises."""

    def forward(self, x: Tensor) -> Tensor:
        error, self.error = self.error, None
        return x * 2 if error is None else RaisesInBackward.apply(x, error)


def failed(step: Seen) -> list[str]:
    """Names of the spans with status ERROR; each must say why in all three places."""
    found = [seen for seen in step.walk() if seen.failed]
    for seen in found:
        (event,) = seen.span.events
        assert event.name == "exception"
        told = {entry.key: entry.value.string_value for entry in event.attributes}
        assert told == {"exception.type": "ValueError", "exception.message": "bad"}
        assert seen.attributes["error.type"] == "ValueError"
        assert seen.span.status.message == "bad"
    return [seen.name for seen in found]


def test_exception_in_forward() -> None:
    """The module that raised and all around it fail, its siblings do not, and the next step is sound."""
    run = fail_then_train(failing(FailsOnce(ValueError("bad"))), "all", ValueError)
    (evaluation,) = run.evaluations
    assert evaluation.tree() == (
        "torch.evaluation",
        [("forward Model", ["forward a", ("forward deep", ["forward deep.0"])])],
    )
    assert failed(evaluation) == ["torch.evaluation", "forward Model", "forward deep", "forward deep.0"]
    step = only_step(run)
    assert step.tree() == step_tree([GOOD_FORWARD], [GOOD_BACKWARD])
    assert (failed(step), estimated(step), estimated(evaluation)) == ([], [], [])


def test_exception_in_forward_with_hooks_out() -> None:
    """Without the module hooks the evaluation fails as a whole."""
    run = fail_then_train(failing(FailsOnce(ValueError("bad"))), "off", ValueError)
    (evaluation,) = run.evaluations
    assert failed(evaluation) == ["torch.evaluation"]
    assert failed(only_step(run)) == []


@pytest.mark.parametrize("detail", ["auto", 2])
def test_exception_in_an_evaluation_with_a_hook_after_ours(detail: Any) -> None:
    """PyTorch reads the global hooks when a forward has raised, so ours stay until that is over."""
    handles: list[RemovableHandle] = []

    def registers_and_raises(_: Any, x: Tensor) -> Tensor:
        handles.append(register_module_forward_hook(lambda *_: None))
        raise ValueError("bad")

    model = Model(registers_and_raises)
    with recorded(detail) as run, torch.no_grad():
        for _ in range(3):
            with pytest.raises(ValueError, match="bad"):
                model(ROWS)
    for handle in handles:
        handle.remove()
    assert [evaluation.failed for evaluation in run.evaluations] == [True] * 3


@both
def test_exception_caught_in_forward(detail: str) -> None:
    """An exception that the caller's forward catches fails the one call and nothing around it."""

    def catching(model: Any, x: Tensor) -> Any:
        with suppress(ValueError):
            x = model.fails(x)
        return model.a(x)

    with recorded(detail) as run:
        train(Model(catching, fails=FailsOnce(ValueError("bad"))), ROWS)
    step = only_step(run)
    assert failed(step) == (["forward fails"] if detail == "all" else [])
    if detail == "all":
        backward = ("backward Model", ["backward a"])
        assert step.tree() == step_tree([("forward Model", ["forward fails", "forward a"])], [backward])


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt()], ids=["exception", "interrupt"])
def test_exception_in_backward(error: BaseException) -> None:
    """The calls whose backward had begun and not ended fail; the next forward and backward are good."""
    step = only_step(fail_then_train(failing(BackwardFailsOnce(error)), "all", type(error)))
    bad_backward = ("backward Model", ["backward b", ("backward deep", ["backward deep.0"])])
    assert step.tree() == (
        "torch.step",
        [
            ("torch.forward", [GOOD_FORWARD]),
            ("torch.backward", [bad_backward]),
            ("torch.forward", [GOOD_FORWARD]),
            ("torch.backward", [GOOD_BACKWARD]),
            "torch.optimizer.step",
        ],
    )
    names = [seen.name for seen in step.walk() if seen.failed]
    assert names == ["torch.step", "torch.backward", "backward Model", "backward deep", "backward deep.0"]


def test_exception_in_backward_with_hooks_out() -> None:
    """Without the module hooks the step and its backward fail."""
    step = only_step(fail_then_train(failing(BackwardFailsOnce(ValueError("bad"))), "off", ValueError))
    phases = ["torch.forward", "torch.backward"]
    assert step.tree() == ("torch.step", [*phases, *phases, "torch.optimizer.step"])
    assert failed(step) == ["torch.step", "torch.backward"]


class StepFailsOnce(torch.optim.SGD):
    """Raises at its first step."""

    def step(self, closure: Any = None) -> Any:
        if not hasattr(self, "failed"):
            self.failed = True
            raise ValueError("bad")
        return super().step(closure)


@both
def test_exception_in_optimizer_step(detail: str) -> None:
    """The step and the phase fail; it ends no training step, and the next one is good."""
    model = Model(lambda m, x: m.a(x))
    optimizer = StepFailsOnce(model.parameters(), 0.1)
    with recorded(detail) as run:
        for raises in (True, False, False):
            model(ROWS).sum().backward()
            with pytest.raises(ValueError, match="bad") if raises else nullcontext():
                optimizer.step()
    retried, good = run.steps
    detailed = step_tree([("forward Model", ["forward a"])], [("backward Model", ["backward a"])])
    once: Any = detailed if detail == "all" else PHASES_ONLY
    assert good.tree() == once
    assert retried.tree() == ("torch.step", [*once[1], *once[1]])
    assert failed(retried) == ["torch.step", "torch.optimizer.step"]
    assert [span.failed for span in retried.find_all("torch.optimizer.step")] == [True, False]
    assert (failed(good), estimated(retried)) == ([], [])


@pytest.mark.parametrize("explicit", [True, False])
def test_an_optimizer_step_that_ends_the_program(*, explicit: bool) -> None:
    """The step is kept for its error, though no event follows."""
    model = nn.Linear(4, 1)
    optimizer = StepFailsOnce(model.parameters(), 0.1)
    with recorded("off") as run, torchotel.step() if explicit else nullcontext():
        model(ROWS).sum().backward()
        with pytest.raises(ValueError, match="bad") if not explicit else suppress(ValueError):
            optimizer.step()
    step = only_step(run)
    assert step.tree() == PHASES_ONLY
    assert failed(step) == ["torch.step", "torch.optimizer.step"]


def test_exception_in_a_closure() -> None:
    """What ran in the optimizer's step before is good."""
    model = Model(lambda m, x: m.a(x))

    def closure() -> float:
        model(ROWS).sum().backward()
        raise ValueError("bad")

    with recorded() as run, suppress(ValueError):
        torch.optim.LBFGS(model.parameters()).step(closure)
    step = only_step(run)
    assert failed(step) == ["torch.step", "torch.optimizer.step"]
    assert {seen.name for seen in step.walk()} >= {"torch.forward", "torch.backward", "forward a", "backward a"}


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt()], ids=["exception", "interrupt"])
def test_exception_in_the_forward_of_a_closure(error: BaseException) -> None:
    """No backward follows, and yet it is a step."""
    model = failing(FailsOnce(error))
    with recorded() as run, suppress(type(error)):
        torch.optim.LBFGS(model.parameters()).step(lambda: model(ROWS).sum())
    (optimizer,) = only_step(run).find_all("torch.optimizer.step")
    assert optimizer.attributes["error.type"] == type(error).__name__
    assert run.evaluations == []


class Wrapping(torch.optim.SGD):
    """Steps another optimizer, and raises nothing that it raises."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, 0.1)
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        with suppress(ValueError):
            self.inner.step()
        return super().step(closure)


def test_exception_caught_by_an_outer_optimizer() -> None:
    """The step of the outer one is the phase: it is good, and ends the training step."""
    model = nn.Linear(4, 1)
    optimizer = Wrapping(StepFailsOnce(model.parameters(), 0.1))
    with recorded() as run:
        for _ in range(2):
            model(ROWS).sum().backward()
            optimizer.step()
    assert [(failed(step), len(step.find_all("torch.optimizer.step"))) for step in run.steps] == [([], 1)] * 2


class Spoilt(Dataset[Tensor]):
    """Three samples, of which the last can't be read."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Tensor:
        if index == 2:
            raise OSError("no such sample")
        return ROWS[index]


@both
def test_loader_that_raises(detail: str) -> None:
    """A fetch that raises belongs to no step; the steps before and after it are good."""
    model = Model(lambda m, x: m.a(x))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with recorded(detail) as run:
        for _ in range(2):
            with suppress(OSError):
                for batch in DataLoader(Spoilt()):
                    model(batch).sum().backward()
                    optimizer.step()
    detailed = step_tree([("forward Model", ["forward a"])], [("backward Model", ["backward a"])])
    once: Any = detailed if detail == "all" else PHASES_ONLY
    first, second = ("torch.step", ["torch.data", "torch.data", *once[1]]), ("torch.step", ["torch.data", *once[1]])
    assert [step.tree() for step in run.steps] == [first, second] * 2  # the making of the iterator is one
