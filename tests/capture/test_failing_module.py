"""A failed step names the module that raised, with module hooks and without."""

import traceback
import weakref
from typing import Any

import pytest
import torch
from support.failing_modules import ROWS, FailsOnce, failing
from support.recorded_training import recorded
from support.single_step_training import Model, only_step
from torch import Tensor, nn
from torch.nn.parallel import DataParallel
from torch.utils.checkpoint import checkpoint

import torchotel
from torchotel import _semconv as names
from torchotel.capture.torch_internals import modules_that_raised

both = pytest.mark.parametrize("detail", ["all", "off"])


class Split(nn.Module):
    """Gives its second layer fewer columns than that takes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x)[:, :3])
        return out


def failed_path(model: nn.Module, detail: str, *, failure: type[Exception] = RuntimeError, grad: bool = True) -> Any:
    """Return the path on the root of the evaluation that a failed forward became."""
    with recorded(detail) as run, torch.set_grad_enabled(grad), pytest.raises(failure):
        model(ROWS)
    (evaluation,) = run.evaluations
    assert evaluation.failed
    return evaluation.attributes.get(names.MODULE_PATH)


@both
@pytest.mark.parametrize("grad", [True, False])
def test_the_innermost_module_is_named(detail: str, grad: bool) -> None:  # noqa: FBT001  # a parameter of the test
    assert failed_path(nn.Sequential(nn.Identity(), Split()), detail, grad=grad) == "1.second"


@both
def test_root_and_phase_of_a_step_are_marked_and_other_spans_not(detail: str) -> None:
    """The second forward of an explicit step was sound; modules keep their own paths."""
    model = failing(FailsOnce(ValueError("bad")))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with recorded(detail) as run, torchotel.step():
        with pytest.raises(ValueError, match="bad"):
            model(ROWS)
        model(ROWS).sum().backward()
        optimizer.step()
    step = only_step(run)
    paths = [(seen.name, seen.attributes.get(names.MODULE_PATH)) for seen in step.walk()]
    plain = [pair for pair in paths if pair[0].startswith("torch.")]
    assert plain == [
        ("torch.step", "deep.0"),
        ("torch.forward", "deep.0"),
        ("torch.backward", None),
        ("torch.optimizer.step", None),
    ]
    assert all(name.endswith(f" {path}") for name, path in paths if not name.startswith("torch."))


@both
def test_a_root_that_raises_itself(detail: str) -> None:
    """It is shown as its class; wrappers stand for what they wrap."""
    assert failed_path(FailsOnce(ValueError("bad")), detail, failure=ValueError) == "FailsOnce"
    assert failed_path(DataParallel(FailsOnce(ValueError("bad"))), detail, failure=ValueError) == "FailsOnce"


def test_a_module_that_forward_makes_is_named_by_its_caller() -> None:
    """It is known only if it was called in a detailed step."""
    model = Model(lambda _, x: FailsOnce(ValueError("bad"))(x))
    assert failed_path(model, "off", failure=ValueError) == "Model"


@both
def test_an_exception_that_is_raised_in_place_of_another(detail: str) -> None:
    """The module that raised the last one counts."""

    def replaces(_: Any, x: Tensor) -> Tensor:
        try:
            return Split()(x)  # type: ignore[no-any-return] # a call of a module
        except RuntimeError:
            raise ValueError("bad") from None

    assert failed_path(Model(replaces), detail, failure=ValueError) == "Model"


@both
def test_a_recomputation_that_raises(detail: str) -> None:
    """In the backward, whose phase has the path of the module that ran again."""
    fails = FailsOnce(ValueError("bad"))
    error, fails.error = fails.error, None
    inner = nn.Sequential(fails, nn.Linear(4, 4))
    model = Model(lambda m, x: checkpoint(m.deep, m.a(x), use_reentrant=False), deep=inner)
    with recorded(detail) as run:
        loss = model(ROWS).sum()
        fails.error = error
        with pytest.raises(ValueError, match="bad"):
            loss.backward()
    (step,) = run.steps
    assert step.attributes[names.MODULE_PATH] == "deep.0"
    assert step.find("torch.backward").attributes[names.MODULE_PATH] == "deep.0"


@both
def test_an_exception_outside_of_modules_names_none(detail: str) -> None:
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            raise ValueError("bad")

    with recorded(detail) as run, pytest.raises(ValueError, match="bad"):
        Raises.apply(nn.Linear(4, 1)(ROWS)).sum().backward()
    (step,) = run.steps
    assert step.failed
    assert names.MODULE_PATH not in step.attributes


def test_reading_a_traceback_keeps_no_tensor() -> None:
    """Once its frames are cleared, the arguments of the calls are gone; `f_locals` would have kept a copy."""
    seen: list[weakref.ref[Tensor]] = []

    def fails(m: Any, x: Tensor) -> Tensor:
        inside = m.a(x)
        seen.append(weakref.ref(inside))
        return m.deep(inside)  # type: ignore[no-any-return] # a call of a module

    model = Model(fails, deep=nn.Sequential(FailsOnce(ValueError("bad"))))
    with torch.no_grad():
        try:
            model(ROWS)
        except ValueError as raised:
            caught = raised
    modules = modules_that_raised(caught.__traceback__)
    alive = [seen[0]() is not None]
    traceback.clear_frames(caught.__traceback__)
    alive.append(seen[0]() is not None)
    assert [type(module).__name__ for module in modules] == ["Model", "Sequential", "FailsOnce"]
    assert alive == [True, False]
