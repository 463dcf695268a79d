"""Ways to compile a model: each gives the numbers and the compilations that it gives without torchotel."""

import shutil
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fidelity.compiled import Way, blocks, blocks_in_place, compare, forward, in_place, whole
from fidelity.layer_subjects import SIDE, Make, chain, subject
from fidelity.subjects import Subject
from fidelity.training import train
from torchotel.testing import capture


class Block(nn.Module):
    """A block of the user's own, with layers in a container, one in place and one at random."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIDE)
        self.layers = nn.Sequential(nn.Linear(SIDE, SIDE), nn.ReLU(inplace=True), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        """Add what the layers make of it."""
        added: Tensor = x + self.layers(self.norm(x))
        return added


class Net(nn.Module):
    """Two blocks and a head; Dynamo compiles its forward, where it compiles a container's whole call."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = Block(), Block(), nn.Linear(SIDE, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Run one after the other."""
        result: Tensor = self.head(self.two(self.one(x)))
        return result


def compiled(build: Make, way: Way, **options: Any) -> Subject:
    """Give a model that is compiled when it is built."""
    return subject("compiled", "", lambda: way(build(), **options), steps=4)


def step(forwards: list[Any], backwards: list[Any]) -> Any:
    """Give the tree of a step."""
    phases = [("torch.forward", forwards), ("torch.backward", backwards), "torch.optimizer.step"]
    return ("torch.step", phases)


ROOTS: dict[str, Make] = {"Net": Net, "Sequential": chain(Block, Block, partial(nn.Linear, SIDE, 4))}
PARTS = {"Net": ["one", "two", "head"], "Sequential": ["0", "1", "2"]}


def expected(way: Way, root: str) -> Any:
    """Give what a step shows: a region is one span, where it is called."""
    if way not in {blocks, blocks_in_place}:
        return step([f"forward {root}*"], [f"backward {root}"])
    parts = PARTS[root]
    ahead, back = [f"forward {part}*" for part in parts], [f"backward {part}" for part in reversed(parts)]
    return step([(f"forward {root}", ahead)], [(f"backward {root}", back)])


needs_a_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=needs_a_compiler)]


@pytest.mark.parametrize("late", [False, True], ids=["instrumented before", "instrumented after"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("way", [whole, in_place, blocks, blocks_in_place, forward])
def test_each_way_compiles_the_same_and_shows_its_regions(way: Way, root: str, backend: str, *, late: bool) -> None:
    """Numbers, graphs, recompilations and words are as without torchotel; a region is one span each way."""
    program = partial(train, compiled(ROOTS[root], way, backend=backend, fullgraph=True))
    twins = compare(program, late=late)
    assert twins.changed == []
    assert twins.trees == [expected(way, root)] * 4


def compiled_and_forgotten(model: nn.Module, **options: Any) -> nn.Module:
    """Compile the model as it stands, for a Dynamo that knows nothing of it."""
    in_place(model, **options)
    torch._dynamo.reset()
    return model


def test_a_region_from_before_a_reset_is_compiled_once() -> None:
    """What was compiled before `torch._dynamo.reset()` and `instrument()` is seen from its second call on."""
    program = partial(train, compiled(ROOTS["Sequential"], compiled_and_forgotten, backend="eager"))
    twins = compare(program, late=True)
    assert twins.changed == []
    assert twins.trees[1:] == [expected(in_place, "Sequential")] * 3


def test_a_region_is_seen_again_after_a_pause() -> None:
    """After `pause` and `resume` it is a span as before, and nothing is compiled again."""
    net = in_place(ROOTS["Sequential"](), backend="eager")
    with capture() as captured:
        net(torch.ones(3, SIDE)).sum().backward()
        captured.handle.pause()
        captured.handle.resume()
        with torch.compiler.set_stance("fail_on_recompile"):
            net(torch.ones(3, SIDE)).sum().backward()
        captured.handle.pause()
        assert [len(step.find_all("forward Sequential")) for step in captured.steps] == [1, 1]
