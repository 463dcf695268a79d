"""Compiled regions: one span each, never a hook inside, never a graph or a recompilation more."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.utils as dynamo
from support.recorded_training import recorded
from torch import Tensor, nn

from torchotel.config.config import Detail

STEPS = 6
REGION = (
    "torch.step",
    [("torch.forward", ["forward Sequential"]), ("torch.backward", ["backward Sequential"]), "torch.optimizer.step"],
)
PHASES = ("torch.step", ["torch.forward", "torch.backward", "torch.optimizer.step"])
Program = Callable[[], None]


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def _train(model: Callable[[Tensor], Tensor], parameters: Any) -> None:
    optimizer = torch.optim.SGD(parameters, 0.1)
    for _ in range(STEPS):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _compiled_module() -> None:
    net = _net()
    _train(torch.compile(net, backend="aot_eager", fullgraph=True), net.parameters())


def _module_compile() -> None:
    net = _net()
    net.compile(backend="aot_eager", fullgraph=True)
    _train(net, net.parameters())


def _compiled_step() -> None:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    @torch.compile(backend="aot_eager")
    def step(x: Tensor) -> None:
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(STEPS):
        step(torch.randn(4, 8))


def _compiled_optimizer() -> None:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    optimizer.step = torch.compile(optimizer.step, backend="aot_eager")  # type: ignore[method-assign]  # as users do
    for _ in range(STEPS):
        net(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _graphs(program: Program) -> tuple[int, int]:
    """Run a program from a clean Dynamo and count its graphs and its graph breaks."""
    torch.compiler.reset()
    dynamo.counters.clear()
    program()
    return dynamo.counters["stats"]["unique_graphs"], sum(dynamo.counters["graph_break"].values())


@pytest.mark.parametrize("detail", ["all", "off", 2])
@pytest.mark.parametrize("program", [_compiled_module, _module_compile, _compiled_step, _compiled_optimizer])
@pytest.mark.filterwarnings("error:Using `torch.compile")
def test_compiles_nothing_more(program: Program, detail: Detail) -> None:
    """A program has no more graphs and graph breaks than without us, whether hooks are in, out, or come and go."""
    graphs, breaks = _graphs(program)
    with recorded(detail=detail) as run:
        ours = _graphs(program)
    assert ours[0] == graphs
    assert ours[1] <= breaks
    assert len(run.steps) == STEPS
    assert run.evaluations == []


@pytest.mark.parametrize("program", [_compiled_module, _module_compile])
def test_one_span_for_a_region(program: Program) -> None:
    """A compiled region is one span, forward and backward, marked as compiled."""
    with recorded() as run:
        program()
    assert [step.tree() for step in run.steps] == [REGION] * STEPS
    assert all(step.find("forward Sequential").attributes["torch.compiled"] is True for step in run.steps)


@pytest.mark.parametrize("program", [_compiled_module, _module_compile])
def test_phases_of_a_region_with_hooks_out(program: Program) -> None:
    """With the hooks out a compiled model still has its phases."""
    with recorded(detail="off") as run:
        program()
    assert [step.tree() for step in run.steps] == [PHASES] * STEPS


@pytest.mark.parametrize("detail", ["all", "off", 2])
@pytest.mark.parametrize("program", [_compiled_module, _module_compile])
def test_hooks_may_come_after_compilation(program: Program, detail: Detail) -> None:
    """Instrumenting a model that is compiled already raises nothing and compiles nothing more."""
    net = _net()
    if program is _compiled_module:
        model: Callable[[Tensor], Tensor] = torch.compile(net, backend="eager", fullgraph=True)
    else:
        net.compile(backend="eager", fullgraph=True)
        model = net
    model(torch.randn(4, 8)).sum().backward()
    with torch.compiler.set_stance("fail_on_recompile"), recorded(detail=detail, model=net) as run:
        _train(model, net.parameters())
    assert len(run.steps) == STEPS


class Block(nn.Module):
    """A module of the user's, whose call Dynamo runs hooks around."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x))


def test_one_span_for_a_compiled_class() -> None:
    """The module inside the compiled one makes no span of its own, neither forward nor backward."""
    net = Block()
    with recorded() as run:
        _train(torch.compile(net, backend="aot_eager"), net.parameters())
    trees = {str(step.tree()) for step in run.steps}
    assert trees == {str(REGION).replace("Sequential", "Block")}


def test_a_compiled_block_in_an_eager_model() -> None:
    """A compiled block is one span under its own name, its eager neighbours are spans as ever."""
    block = torch.compile(_net(), backend="eager")
    assert isinstance(block, nn.Module)
    model = nn.Sequential(block, nn.Linear(8, 8))
    with recorded() as run:
        _train(model, model.parameters())
    net = run.steps[-1].find("forward Sequential")
    assert [(child.name, child.attributes.get("torch.compiled")) for child in net.children] == [
        ("forward 0", True),
        ("forward 1", None),
    ]


def test_compile_after_a_reset() -> None:
    """`torch._dynamo.reset()` clears callbacks; hooks stay out of what is compiled after it all the same."""
    with recorded() as run:
        for _ in range(2):
            torch.compiler.reset()
            dynamo.counters.clear()
            _compiled_module()
            assert dynamo.counters["stats"]["unique_graphs"] == 1
    assert len(run.steps) == 2 * STEPS


def test_a_region_that_raises_ends_with_its_error() -> None:
    """An exception inside a compiled region passes through and stands on the region's span."""
    net = nn.Sequential(nn.Linear(8, 8))
    net.compile(backend="eager")
    with recorded(model=net) as run:
        with pytest.raises(RuntimeError, match=r"reduction dim|cannot be multiplied"):
            net(torch.randn(4, 3))
        _train(net, net.parameters())
    (evaluation,) = run.evaluations
    assert evaluation.find("forward Sequential").failed
    assert [step.find("forward Sequential").failed for step in run.steps] == [False] * STEPS


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("detail", ["all", "off"])
def test_export_works_and_makes_no_spans(strict: bool, detail: Detail) -> None:  # noqa: FBT001  # a parameter of the test
    """`torch.export.export` works in both modes; strict tracing fails with any global hook in."""
    net = _net()
    with recorded(detail=detail) as run:
        _train(net, net.parameters())
        program = torch.export.export(net, (torch.randn(4, 8),), strict=strict)
        x = torch.randn(4, 8)
        assert torch.equal(program.module()(x), net(x))
    assert len(run.steps) == STEPS


def test_shutdown_gives_regions_their_own_call_back() -> None:
    """After `shutdown()` a region made by `module.compile()` is called as PyTorch set it."""
    net = _net()
    net.compile(backend="eager")
    before = net._compiled_call_impl
    with recorded(model=net):
        assert net._compiled_call_impl is not before
        net(torch.randn(4, 8))
    assert net._compiled_call_impl is before


def test_a_pause_while_something_is_compiled() -> None:
    """Nobody tells us of the end of that compilation, and after the pause steps have their spans all the same."""

    def pauses(graph: Any, _: Any) -> Any:
        run.handle.pause()
        return graph

    net = _net()
    with recorded() as run:
        torch.compile(net, backend=pauses)(torch.randn(4, 8))
        run.handle.resume()
        _train(net, net.parameters())
    marks = [[len(step.find_all(f"{phase} Sequential")) for phase in ("forward", "backward")] for step in run.steps]
    assert marks == [[1, 1]] * STEPS


def test_a_compiled_module_is_freed() -> None:
    """A module on which `compile()` was called goes with its last reference, and the garbage collector."""
    with recorded():
        net = _net()
        net.compile(backend="eager")
        net(torch.randn(4, 8))
        reference = weakref.ref(net)
        del net
        torch._dynamo.reset()
        gc.collect()
        assert reference() is None


def test_a_net_that_is_compiled_while_it_trains() -> None:
    """`module.compile()` after eager steps marks the region from its next call on."""
    net = _net()
    with recorded() as run:
        _train(net, net.parameters())
        net.compile(backend="eager")
        _train(net, net.parameters())
    marks = [step.find("forward Sequential").attributes.get("torch.compiled") for step in run.steps]
    assert marks == [None] * STEPS + [True] * STEPS


def test_a_traced_graph_of_the_users_is_a_module() -> None:
    """A graph that `torch.fx` made of a user's layer is a module like any other."""
    net = torch.fx.symbolic_trace(nn.Linear(8, 8))
    with recorded() as run:
        _train(net, net.parameters())
    assert [len(step.find_all("forward Linear")) for step in run.steps] == [1] * STEPS
