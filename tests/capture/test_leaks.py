"""Nothing of the user's is kept alive, with the garbage collector off."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, ClassVar

import pytest
import torch
from support.recorded_training import recorded
from support.single_step_training import Model
from torch import Tensor, nn

ROWS = torch.arange(8.0).reshape(2, 4) / 8
both = pytest.mark.parametrize("detail", ["all", "off"])


class Token:
    """Lives as long as the autograd node that holds it."""


class Probe(torch.autograd.Function):
    """An operation whose living nodes can be counted."""

    living: ClassVar["weakref.WeakSet[Token]"] = weakref.WeakSet()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.token = Token()
        Probe.living.add(ctx.token)
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if gradients[0].isnan().any():
            raise ValueError("not a number")
        return gradients[0]


class Probed(nn.Module):
    """A layer and a countable operation; raises what it is given as soon as it has computed."""

    def __init__(self, failure: type[BaseException] | None = None) -> None:
        super().__init__()
        self.layer, self.failure = nn.Linear(4, 4), failure

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Probe.apply(self.layer(x))
        if self.failure is not None:
            raise self.failure
        return y


@pytest.fixture(autouse=True)
def _without_collector() -> Iterator[None]:
    gc.collect()
    Probe.living.clear()
    gc.disable()
    yield
    gc.enable()


def probed(failure: type[BaseException] | None = None) -> nn.Module:
    return nn.Sequential(Probed(), nn.Sequential(Probed(), nn.ReLU(inplace=True)), Probed(failure))


def only_forward() -> None:
    probed()(ROWS)


def forward_and_backward() -> None:
    probed()(ROWS).sum().backward()


def kept_graph() -> None:
    loss = probed()(ROWS).sum()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)


def double_backward() -> None:
    x = ROWS.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(probed()(x).sum(), x, create_graph=True)
    gradient.sum().backward()


def several_outputs() -> None:
    model = Model(lambda m, x: {"one": m.probed(x), "two": [m.a(x), m.probed(x)]}, probed=Probed())
    model(ROWS)["one"].sum().backward()


def checkpointed() -> None:
    inner = Probed()
    layer = nn.Linear(4, 4)
    torch.utils.checkpoint.checkpoint(inner, layer(ROWS), use_reentrant=False).sum().backward()


def failed_forward() -> None:
    with suppress(ValueError):
        probed(ValueError)(ROWS)


def interrupted_forward() -> None:
    with suppress(KeyboardInterrupt):
        probed(KeyboardInterrupt)(ROWS)


def failed_backward() -> None:
    with suppress(ValueError):
        (probed()(ROWS) * torch.nan).sum().backward()


PROGRAMS = [
    only_forward,
    forward_and_backward,
    kept_graph,
    double_backward,
    several_outputs,
    checkpointed,
    failed_forward,
    interrupted_forward,
    failed_backward,
]


@both
@pytest.mark.parametrize("program", PROGRAMS)
def test_no_graph_outlives_its_program(program: Callable[[], None], detail: str) -> None:
    """No node of the graph lives on, while the step is still open and the hooks are in."""
    with recorded(detail):
        for _ in range(3):
            program()
            assert len(Probe.living) == 0


def test_graph_of_the_probe_is_seen() -> None:
    """A graph that is kept has living nodes: the count above can tell."""
    kept = probed()(ROWS)
    assert len(Probe.living) == 3
    del kept
    assert len(Probe.living) == 0


@both
@pytest.mark.parametrize("program", [only_forward, forward_and_backward, failed_forward, failed_backward])
def test_modules_are_freed(program: Callable[[], None], detail: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules and parameters go with their last reference, while the step that they ran in is open."""
    made: list[weakref.ref[Any]] = []

    def remembered(failure: type[BaseException] | None = None) -> nn.Module:
        model = make(failure)
        made.extend(weakref.ref(module) for module in model.modules())
        made.extend(weakref.ref(parameter) for parameter in model.parameters())
        return model

    make = probed
    monkeypatch.setitem(globals(), "probed", remembered)
    with recorded(detail):
        program()
        assert made
        assert [reference() for reference in made if reference() is not None] == []


@both
def test_interrupted_module_is_freed_at_the_next_event(detail: str) -> None:
    """A call that an interrupt left open holds its modules until the thread's next event, and no longer."""
    with recorded(detail):
        model = probed(KeyboardInterrupt)
        reference = weakref.ref(model)
        with suppress(KeyboardInterrupt):
            model(ROWS)
        del model
        nn.Linear(4, 4)(ROWS)
        assert reference() is None
