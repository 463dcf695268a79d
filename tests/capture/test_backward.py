"""Backward spans however the graph is run: twice, in part, later, again and nested."""

from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any

import pytest
import torch
from support.recorded_training import Seen, recorded
from support.single_step_training import PHASES_ONLY, Model, attributes, only_step, recorded_step, step_tree, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ROWS = torch.arange(8.0).reshape(2, 4) / 8
FORWARD = ("forward Model", ["forward a", "forward b"])
BACKWARD = ("backward Model", ["backward b", "backward a"])
both = pytest.mark.parametrize("detail", ["all", "off"])


def chain() -> Model:
    return Model(lambda m, x: m.b(torch.tanh(m.a(x))))


def step_by(program: Callable[[Model], None], model: Model, detail: str = "all") -> Seen:
    """Run a program and an optimizer's step; give the step that they make."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with recorded(detail) as run:
        program(model)
        optimizer.step()
    return only_step(run)


def estimates(step: Seen) -> dict[str, str]:
    found = {seen.name: seen.attributes.get("torch.estimated") for seen in step.walk()}
    return {name: end for name, end in found.items() if end is not None}


@both
def test_two_backwards_through_one_graph(detail: str) -> None:
    """A graph that is kept and run again has the spans of each run under that run."""

    def twice(model: Model) -> None:
        loss = model(ROWS).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    step = step_by(twice, chain(), detail)
    runs = [("torch.backward", [BACKWARD])] * 2 if detail == "all" else ["torch.backward"] * 2
    forward = ("torch.forward", [FORWARD]) if detail == "all" else "torch.forward"
    assert step.tree() == ("torch.step", [forward, *runs, "torch.optimizer.step"])


def test_backward_through_earlier_steps() -> None:
    """A backward that reaches into the steps before has their calls too, in the step that runs it."""
    model = Model(lambda m, x, state: m.a(x) + m.b(state))
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)  # leaves the graph's weights alone
    state = torch.zeros(2, 4)
    with recorded() as run:
        for _ in range(3):
            state = model(ROWS, state)
            state.sum().backward(retain_graph=True)
            optimizer.step()
    assert [step.tree() for step in run.steps] == [step_tree([FORWARD], [BACKWARD] * n) for n in (1, 2, 3)]


def test_double_backward() -> None:
    """A gradient of a gradient has both runs; in the first, of the input's alone, no layer comes to its end."""

    def penalised(model: Model) -> None:
        x = ROWS.clone().requires_grad_()
        loss = model(x).sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + gradient.pow(2).sum()).backward()

    step = step_by(penalised, chain())
    first, second = step.find_all("torch.backward")
    assert first.tree() == second.tree() == ("torch.backward", [BACKWARD])
    assert estimates(first) == {"backward a": "end", "backward b": "end"}
    assert estimates(second) == {}


def test_gradient_of_an_intermediate() -> None:
    """Where only part of the graph is asked for, only its calls have spans, and an end that did not come is a bound."""
    kept: list[Tensor] = []

    def keeping(model: Any, x: Tensor) -> Any:
        kept[:] = [model.a(x)]
        return model.b(kept[0])

    def partly(model: Model) -> None:
        loss = model(ROWS).sum()
        torch.autograd.grad(loss, kept, retain_graph=True)
        loss.backward()

    first, second = step_by(partly, Model(keeping)).find_all("torch.backward")
    assert first.tree() == ("torch.backward", [("backward Model", ["backward b"])])
    assert estimates(first) == {"backward b": "end"}
    assert second.tree() == ("torch.backward", [BACKWARD])
    assert estimates(second) == {}


@both
def test_gradient_inside_forward(detail: str) -> None:
    """A forward that takes a gradient (a force field) has a backward run in it, besides the step's own."""

    def forces(model: Any, x: Tensor) -> Tensor:
        places = x.clone().requires_grad_()
        energy = model.b(torch.tanh(model.a(places))).sum()
        return torch.autograd.grad(energy, places, create_graph=True)[0]

    step = recorded_step(Model(forces), ROWS, detail=detail)
    forward = step.find("torch.forward")
    inner, outer = step.find_all("torch.backward")
    assert forward.start_ns < inner.start_ns < inner.end_ns < forward.end_ns <= outer.start_ns
    if detail == "all":
        assert forward.tree() == ("torch.forward", [FORWARD])
        assert inner.tree() == ("torch.backward", ["backward b", "backward a"])  # the model's own is not known yet
        assert outer.tree() == ("torch.backward", [BACKWARD])


def test_output_that_is_not_used() -> None:
    """Of two outputs the one that the loss leaves out has no backward."""
    inner = Model(lambda m, x: (m.a(x), m.b(x)))
    step = recorded_step(Model(lambda m, x: m.two(x), two=inner), ROWS, loss=lambda pair: pair[1].sum())
    assert step.find("torch.backward").tree() == (
        "torch.backward",
        [("backward Model", [("backward two", ["backward two.b"])])],
    )
    assert estimates(step) == {}


def test_shared_input() -> None:
    """Layers that share an input end when their own work ends, not when the sum of their gradients is ready."""
    layers = {name: nn.Linear(4, 4) for name in "qkv"}
    model = Model(lambda m, x: (shared := m.a(x)) is x or m.q(shared) * m.k(shared) * m.v(shared), **layers)
    step = recorded_step(model, ROWS)
    backward = step.find("backward Model")
    assert backward.tree() == ("backward Model", [f"backward {name}" for name in "vkqa"])
    assert all(
        one.end_ns < next_.start_ns for one, next_ in zip(backward.children, backward.children[1:], strict=False)
    )


def test_loss_kept_on_a_module() -> None:
    """A loss that a layer keeps for itself runs through that layer alone."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            y = self.layer(x)
            self.loss = y.pow(2).mean()
            return y

    part = WithLoss()
    step = recorded_step(Model(lambda m, x: m.b(m.part(x)), part=part), ROWS, loss=lambda _: part.loss)
    below = ("backward Model", [("backward part", ["backward part.layer"])])
    assert step.find("torch.backward").tree() == ("torch.backward", [below])


def checkpointed(*, use_reentrant: bool) -> Model:
    middle = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def run(model: Any, x: Tensor) -> Any:
        return model.b(checkpoint(model.mid, model.a(x), use_reentrant=use_reentrant))

    return Model(run, mid=middle)


MIDDLE = ("forward mid", ["forward mid.0", "forward mid.1", "forward mid.2"])


def test_checkpoint() -> None:
    """What is computed again stands below the backward that needs it, and its early end is no error."""
    step = recorded_step(checkpointed(use_reentrant=False), ROWS)
    middle = ("backward mid", [("backward mid.2", [MIDDLE]), "backward mid.1", "backward mid.0"])
    backward = ("backward Model", ["backward b", middle, "backward a"])
    assert step.tree() == step_tree([("forward Model", ["forward a", MIDDLE, "forward b"])], [backward])


def test_reentrant_checkpoint() -> None:
    """What is computed again stands below the running backward, and has a run of the engine inside that one."""
    step = recorded_step(checkpointed(use_reentrant=True), ROWS)
    inner = ("torch.backward", [("backward mid", ["backward mid.2", "backward mid.1", "backward mid.0"])])
    outer = ("backward Model", ["backward b", MIDDLE, "backward a"])
    assert step.tree() == step_tree([("forward Model", ["forward a", MIDDLE, "forward b"])], [outer, inner])


def test_reentrant_checkpoint_of_an_operation_in_place() -> None:
    """A module that gives out the tensor that it took, changed, has its backward in the run of the recomputation."""
    body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    model = Model(lambda m, x: checkpoint(m.body, m.a(x), use_reentrant=True), body=body)
    step = recorded_step(model, ROWS)
    inner = ("torch.backward", [("backward body", ["backward body.1", "backward body.0"])])
    forward = ("forward body", ["forward body.0", "forward body.1"])
    backward = [("backward Model", [forward, "backward a"]), inner]
    assert step.tree() == step_tree([("forward Model", ["forward a", forward])], backward)


class Viewing(nn.Module):
    """Gives out a view of what it makes, as a linear layer on three dimensions does in some versions of PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).view_as(x)


def test_an_operation_in_place_that_begins_late() -> None:
    """It takes the node away that a layer's start was seen on: for one step that is estimated, then never again."""
    model = Model(lambda m, x, relu: m.b(relu(m.a(x))), a=Viewing())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with recorded() as run:
        for relu in (torch.relu, torch.relu, torch.relu_, torch.relu_, torch.relu, torch.relu_):
            model(ROWS, relu).sum().backward()
            optimizer.step()
    assert [estimates(step) for step in run.steps] == [{}, {}, {"backward a": "start"}, {}, {}, {}]
    assert all(step.tree() == step_tree([FORWARD], [BACKWARD]) for step in run.steps)


@pytest.mark.parametrize("in_place", [[True, False], [False, True]])
def test_an_operation_in_place_on_one_of_two_outputs_of_a_layer(in_place: list[bool]) -> None:
    """Each call of a layer that is called twice has its exact start, in every step."""
    relus = [torch.relu_ if one else torch.relu for one in in_place]
    model = Model(lambda m, x: m.b(relus[1](m.a(relus[0](m.a(x))))), a=Viewing())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with recorded() as run:
        for _ in range(4):
            model(ROWS).sum().backward()
            optimizer.step()
    assert [estimates(step) for step in run.steps] == [{}] * 4


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_is_marked(*, use_reentrant: bool) -> None:
    """Only the second forward of a checkpoint is recomputation, it is no further call, and nothing fails."""
    step = recorded_step(checkpointed(use_reentrant=use_reentrant), ROWS)
    for name in ("mid", "mid.0", "mid.1", "mid.2"):
        assert attributes(step, f"forward {name}", "recompute") == [None, True]
        assert attributes(step, f"forward {name}", "call.index") == [None, None]
    assert not any(seen.failed for seen in step.walk())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_with_hooks_out(*, use_reentrant: bool) -> None:
    """With the module hooks out recomputation opens nothing."""
    step = recorded_step(checkpointed(use_reentrant=use_reentrant), ROWS, detail="off")
    nested: Any = ("torch.backward", ["torch.backward"]) if use_reentrant else "torch.backward"
    assert step.tree() == (PHASES_ONLY[0], ["torch.forward", nested, "torch.optimizer.step"])


ON_ANOTHER_THREAD = 62
"""Nested backwards beyond which the engine takes another thread, as it takes one for the backward of a device."""


def nested(model: Model, x: Tensor, depth: int = ON_ANOTHER_THREAD) -> Any:
    if not depth:
        return model.b(x)
    return checkpoint(lambda x: model.a(nested(model, x, depth - 1)), x, use_reentrant=True)


def test_a_backward_on_a_thread_of_the_engine_is_no_step_of_that_thread() -> None:
    """The recomputations there are in the step, below the backward."""
    threads, model = set[int](), Model(nested)
    model.a.register_forward_hook(lambda *_: threads.add(get_ident()))
    with recorded("all", max_spans=None) as run:
        train(model, ROWS.clone().requires_grad_(), steps=3)
    assert len(threads) > 1
    assert len(run.steps) == 3
    for step in run.steps:
        recomputed = attributes(step, "forward a", "recompute")
        assert recomputed.count(None) == ON_ANOTHER_THREAD
        assert recomputed.count(True) == ON_ANOTHER_THREAD * (ON_ANOTHER_THREAD + 1) / 2


@pytest.mark.parametrize("depth", [1, ON_ANOTHER_THREAD])
def test_an_optimizer_steps_inside_a_backward(depth: int) -> None:
    """In a hook of its parameter, on the thread of the engine: it is in the step whose backward calls it.

    https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html
    """
    threads, model = set[int](), Model(partial(nested, depth=depth))
    optimizers: dict[Tensor, torch.optim.Optimizer] = {one: torch.optim.SGD([one], 0.1) for one in model.parameters()}

    def step(parameter: Tensor) -> None:
        threads.add(get_ident())
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    with recorded("off") as run:
        for _ in range(3):
            model(ROWS.clone().requires_grad_()).sum().backward()
    assert (threads == {get_ident()}) == (depth == 1)
    assert len(run.steps) == 3
    assert all(step.find_all("torch.optimizer.step") for step in run.steps)
