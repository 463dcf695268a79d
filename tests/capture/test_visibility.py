"""What looks at a program's tensors and modules from inside PyTorch sees nothing of ours."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from support.recorded_training import recorded
from support.single_step_training import Model, train
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

ROW = torch.ones(2, 4)


class Noting(TorchFunctionMode):
    """Notes every function of torch that is called in its block."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(
        self, function: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class Noted(Tensor):
    """Notes every function of torch that is called with one of its kind."""

    seen: list[str]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        cls.seen.append(getattr(function, "__qualname__", str(function)))
        return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]  # torch's own


def in_a_mode(model: nn.Module) -> list[str]:
    noting = Noting()
    with noting:
        train(model, ROW)
    return noting.seen


def of_a_subclass(model: nn.Module) -> list[str]:
    Noted.seen = []
    loss: Tensor = model(ROW.as_subclass(Noted)).sum()
    loss.backward()
    return [name for name in Noted.seen if "backward" not in name]


@pytest.mark.parametrize("model", [lambda: nn.Linear(4, 4), lambda: Model(lambda m, x: {"y": m.a(x)}["y"])])
@pytest.mark.parametrize("program", [in_a_mode, of_a_subclass])
def test_torch_functions(program: Callable[[nn.Module], list[str]], model: Callable[[], nn.Module]) -> None:
    """A `__torch_function__` of the user's, of a mode or of a subclass, is called as often as without us."""
    program(model())  # what torch imports at its first use
    without = program(model())
    with recorded() as run:
        assert program(model()) == without
    assert run.roots


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
def test_jit_trace() -> None:
    """The graph that `torch.jit.trace` makes is the one that it makes without us, and nothing of it is recorded."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    without = str(torch.jit.trace(model, ROW, check_trace=False).graph)
    with recorded() as run:
        graph = str(torch.jit.trace(model, ROW, check_trace=False).graph)
    assert [line.split(":")[0] for line in graph.splitlines()] == [line.split(":")[0] for line in without.splitlines()]
    assert run.roots == []


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
@pytest.mark.parametrize("detail", ["all", "off"])
def test_scripted_modules(detail: str) -> None:
    """A scripted module trains, alone, inside another module, and called part by part."""
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    inside = Model(lambda m, x: m.scripted(m.a(x)), scripted=scripted)
    by_parts = Model(lambda m, x: getattr(m.scripted, "1")(getattr(m.scripted, "0")(x)), scripted=scripted)
    with recorded(detail) as run:
        for model in (scripted, inside, by_parts):
            train(model, ROW, steps=2)
    assert len(run.steps) == 6
