"""What programs do with compiled models: each does the same with torchotel and without."""

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fidelity.compiled import Program, Way, blocks_in_place, compare, in_place, whole
from fidelity.layer_subjects import SIDE, Applied, Make, chain, subject
from fidelity.test_compiled import Net, step
from fidelity.training import Outcome, train
from torchotel.tracing.diagnostics import NO_FORWARD

Run = Callable[..., Any]
Around = Callable[[], AbstractContextManager[object]]
LAYERS = chain(partial(nn.Linear, SIDE, SIDE), nn.Tanh, partial(nn.Linear, SIDE, SIDE))
FULL: dict[str, Any] = {"backend": "eager", "fullgraph": True}
BOTH_WAYS: dict[str, Any] = {"backend": "aot_eager"}
"""Compiles the backward too."""
STEPS = 3


def calling(
    run: Run, way: Way = whole, net: Make = LAYERS, around: Around = nullcontext, **options: Any
) -> Callable[[Callable[[], object]], Outcome]:
    """Give a program that trains an eager model, whose forward is `run`, with a compiled net inside."""

    def build() -> nn.Module:
        return Applied(run, net=way(net(), **{**FULL, **options}))

    def program(began: Callable[[], object]) -> Outcome:
        with around():
            return train(subject("compiled", "", build, steps=STEPS), began)

    return program


class Broken(nn.Module):
    """A module that Dynamo can't compile into one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE)

    def forward(self, x: Tensor) -> Tensor:
        """Break in the midst."""
        x = self.one(x)
        torch._dynamo.graph_break()
        result: Tensor = self.two(x)
        return result


def simple(model: Any, x: Tensor) -> Any:
    return model.net(x)


def checkpointed(model: Any, x: Tensor, *, reentrant: bool) -> Any:
    return checkpoint(model.net, x.requires_grad_(), use_reentrant=reentrant)


def in_mixed_precision(model: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return model.net(x)


def evaluated_before(model: Any, x: Tensor) -> Any:
    with torch.no_grad():
        model.net.eval()(x)
    return model.net.train()(x)


def eager_after_all(model: Any, x: Tensor) -> Any:
    with torch.compiler.set_stance("force_eager"):
        return model.net(x)


def each(do: Callable[[Any, Tensor, int], Any]) -> Run:
    """Give a forward that knows the number of its call; it is kept where a copy of the model begins anew."""

    def run(model: Any, x: Tensor) -> Any:
        number = vars(model).get("number", 0)
        object.__setattr__(model, "number", number + 1)
        return do(model, x, number)

    return run


def growing(model: Any, x: Tensor, number: int) -> Any:
    return model.net(x.repeat(number + 1, 1))


def marked(model: Any, x: Tensor, number: int) -> Any:
    grown = x.repeat(number + 2, 1)
    torch._dynamo.mark_dynamic(grown, 0)
    return model.net(grown)


def forgotten(model: Any, x: Tensor, number: int) -> Any:
    if number == 1:
        torch._dynamo.reset()
    return model.net(x)


def never_again(model: Any, x: Tensor, number: int) -> Any:
    with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
        return model.net(x)


def compiled_autograd() -> AbstractContextManager[object]:
    patched: AbstractContextManager[object] = torch._dynamo.config.patch(compiled_autograd=True)
    return patched


NESTED = subject("compiled", "", lambda: whole(blocks_in_place(Net(), **FULL), **FULL), steps=STEPS)
WHOLE = step(["forward Net*"], ["backward Net"])
INSIDE = step([("forward Applied", ["forward net*"])], [("backward Applied", ["backward net"])])
AGAIN = step([("forward Applied", ["forward net*"])], [("backward Applied", [("backward net", ["forward net*"])])])
RUN_INSIDE = ("torch.backward", [("backward Applied", ["forward net*"]), ("torch.backward", ["backward net"])])
TWICE = step([("forward Applied", ["forward net*"] * 2)], [("backward Applied", ["backward net"])])
PROGRAMS: dict[str, tuple[Program, Any]] = {
    "checkpoint": (calling(partial(checkpointed, reentrant=False), **BOTH_WAYS), AGAIN),
    "checkpoint of a region in place": (calling(partial(checkpointed, reentrant=False), in_place, **BOTH_WAYS), AGAIN),
    "reentrant checkpoint": (
        calling(partial(checkpointed, reentrant=True), **BOTH_WAYS),
        ("torch.step", [INSIDE[1][0], RUN_INSIDE, INSIDE[1][2]]),
    ),
    "autocast": (calling(in_mixed_precision, **BOTH_WAYS), INSIDE),
    "evaluation before": (calling(evaluated_before, in_place), TWICE),
    "force_eager": (calling(eager_after_all), INSIDE),
    "sizes that change": (calling(each(growing), **BOTH_WAYS), INSIDE),
    "sizes that change, in place": (calling(each(growing), in_place), INSIDE),
    "dynamic=True": (calling(each(growing), dynamic=True), INSIDE),
    "mark_dynamic": (calling(each(marked), in_place), INSIDE),
    "reset": (calling(each(forgotten)), INSIDE),
    "reset, in place": (calling(each(forgotten), in_place), INSIDE),
    "fail_on_recompile": (calling(each(never_again)), INSIDE),
    "fail_on_recompile, in place": (calling(each(never_again), in_place), INSIDE),
    "graph breaks": (calling(simple, net=chain(Broken, Broken), fullgraph=False), INSIDE),
    "graph breaks, in place": (calling(simple, in_place, chain(Broken, Broken), fullgraph=False), INSIDE),
    "compiled autograd": (calling(simple, around=compiled_autograd, **BOTH_WAYS), INSIDE),
    "compiled autograd, in place": (calling(simple, in_place, around=compiled_autograd, **BOTH_WAYS), INSIDE),
    "regions in a compiled model": (partial(train, NESTED), WHOLE),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_does_the_same(name: str) -> None:
    """Numbers, graphs, recompilations and words are as without torchotel, hooks in or going out and in."""
    program, expected = PROGRAMS[name]
    twins = compare(program)
    assert twins.changed == []
    assert twins.trees == [expected] * STEPS
    assert compare(program, late=True, detail=2).changed == []


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_inductor_does_the_same() -> None:
    """Inductor's kernels are the same too; on the CPU `reduce-overhead` falls back to them."""
    twins = compare(calling(simple, backend="inductor", mode="reduce-overhead"))
    assert twins.changed == []
    assert twins.trees == [INSIDE] * STEPS


def compiled_step(began: Callable[[], object], *, whole_step: bool) -> Outcome:
    """Train with a compiled optimizer, by itself or in a function that is compiled with all of a step."""
    torch.manual_seed(0)
    net, outcome = LAYERS(), Outcome()
    optimizer = torch.optim.AdamW(net.parameters())

    def run(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    if whole_step:
        run = torch.compile(run, **BOTH_WAYS)
    else:
        optimizer.step = torch.compile(optimizer.step, **BOTH_WAYS)  # type: ignore[method-assign]  # as users do
    began()
    outcome.numbers = {f"loss {number}": run(torch.randn(3, SIDE)).detach() for number in range(STEPS)}
    outcome.numbers |= {name: value.detach() for name, value in net.named_parameters()}
    return outcome


@pytest.mark.parametrize("whole_step", [False, True], ids=["optimizer", "whole step"])
def test_a_compiled_optimizer_does_the_same(whole_step: bool) -> None:  # noqa: FBT001  # a parameter of the test
    """The optimizer is one graph, as without torchotel, and its step is a span; a forward inside of it can't be."""
    twins = compare(partial(compiled_step, whole_step=whole_step))
    assert twins.changed == ([f"torchotel: {NO_FORWARD}"] if whole_step else [])
    assert [len(step.find_all("torch.optimizer.step")) for step in twins.captured.steps] == [1] * STEPS
