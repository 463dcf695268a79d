"""Module calls of every shape: which spans they make, and that they compute what they would alone."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.module_call_cases import CASES, ROWS, Case
from support.recorded_training import recorded
from support.single_step_training import PHASES_ONLY, Model, attributes, recorded_step, step_tree, train
from torch import Tensor, nn

all_cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def spans(direction: str, tree: Any) -> Any:
    """Put the direction before each name of a tree."""
    if isinstance(tree, list):
        return [spans(direction, child) for child in tree]
    if isinstance(tree, tuple):
        return (f"{direction} {tree[0]}", spans(direction, tree[1]))
    return f"{direction} {tree}"


@all_cases
def test_spans_of_a_call(case: Case) -> None:
    """Each call is a span inside its caller's, forward and, where it made a node of the graph, backward."""
    step = recorded_step(case.model(), **case.keywords)
    forward, backward = ("Model", case.forward), ("Model", case.backward)
    assert step.tree() == step_tree([spans("forward", forward)], [spans("backward", backward)])
    assert all("torch.estimated" not in seen.attributes for seen in step.walk())


@pytest.mark.parametrize("detail", ["all", "off", 2])
@all_cases
def test_same_numbers(case: Case, detail: str | int) -> None:
    """Losses and parameters are bit for bit those of the uninstrumented run, with the hooks in, out and in turns."""
    torch.manual_seed(1)
    expected = train(case.model(), steps=3, **case.keywords)
    torch.manual_seed(1)
    with recorded(detail) as run:
        got = train(case.model(), steps=3, **case.keywords)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert len(run.steps) == 3
    if detail == "off":
        assert [step.tree() for step in run.steps] == [PHASES_ONLY] * 3


def test_calls_of_a_shared_module_are_numbered() -> None:
    """The calls of a module that runs more than once carry their number, and so do their backwards."""
    step = recorded_step(CASES["shared"].model(), ROWS)
    assert attributes(step, "forward a", "call.index") == [0, 1]
    assert attributes(step, "backward a", "call.index") == [1, 0]
    assert attributes(step, "forward b", "call.index") == [None]


def test_calls_of_a_recursive_module_are_numbered_as_they_begin() -> None:
    """The outer call of a module that calls itself is its first."""
    step = recorded_step(CASES["recursive"].model(), ROWS)
    assert attributes(step, "forward Model", "call.index") == [0, 1]
    assert attributes(step, "backward Model", "call.index") == [0, 1]


def test_call_without_grad_says_so() -> None:
    """A call inside `no_grad` says so."""
    step = recorded_step(CASES["partly without grad"].model(), ROWS)
    assert attributes(step, "forward a", "grad_enabled") == [False]
    assert attributes(step, "forward b", "grad_enabled") == [True]


@pytest.mark.parametrize(
    ("name", "inputs", "outputs"),
    [
        ("keywords", ["2x4", "1x4"], ["2x4"]),
        ("integers", ["2"], ["2x4"]),
        ("dict", ["2x4"], ["2x4", "2x4"]),
        ("dataclass", ["2x4"], ["2x4", "2x4"]),
        ("nested", ["2x4"], ["2x4", "2x4"]),
        ("scalar out", ["2x4"], ["scalar"]),
        ("jagged", ["2x*x4"], ["3x4"]),
    ],
)
def test_shapes(name: str, inputs: list[str], outputs: list[str]) -> None:
    """Containers are flattened in order, keyword arguments count, a ragged dimension is a star."""
    case = CASES[name]
    step = recorded_step(case.model(), **case.keywords)
    assert attributes(step, "forward Model", "input.shapes") == [inputs]
    assert attributes(step, "forward Model", "output.shapes") == [outputs]
    assert attributes(step, "backward Model", "grad_output.shapes") == [outputs]


def test_integers_have_no_gradient() -> None:
    """An embedding's input has a dtype, and no gradient."""
    case = CASES["integers"]
    step = recorded_step(case.model(), **case.keywords)
    assert attributes(step, "forward table", "input.dtypes") == [["int64"]]
    assert attributes(step, "backward table", "grad_input.shapes") == [[]]


def test_output_without_tensor_has_no_shapes() -> None:
    """A call that returns a string has an input shape and no output shape."""
    step = recorded_step(CASES["no tensor out"].model(), ROWS)
    assert attributes(step, "forward words", "input.shapes") == [["2x4"]]
    assert attributes(step, "forward words", "output.shapes") == [[]]


def test_what_passes_through_is_the_same_object() -> None:
    """`nn.Identity` returns the very tensor that it got, with hooks in as without."""
    seen: list[Tensor] = []

    def through(model: Any, x: Tensor) -> Any:
        seen[:] = [y := model.a(x), model.none(y)]
        return y

    recorded_step(Model(through, none=nn.Identity()), ROWS)
    assert seen[0] is seen[1]


def test_packed_nested_tensor() -> None:
    """A nested tensor of the older layout, which has no shape, goes through modules like any other."""
    ragged = torch.nested.nested_tensor([ROWS, ROWS[:1]])
    step = recorded_step(Model(lambda m, x: m.none(m.a(x)).to_padded_tensor(0.0), none=nn.Identity()), ragged)
    assert attributes(step, "forward a", "input.shapes") == [["2x*x4"]]
    assert step.find("backward a").parent is step.find("backward Model")


def yielding(model: Any, x: Tensor) -> Iterator[Tensor]:
    yield model.a(x)
    yield model.b(x)


@pytest.mark.parametrize("detail", ["all", "off"])
def test_generator(detail: str) -> None:
    """A generator's call ends before it runs; what it calls while it is read stands beside it."""
    step = recorded_step(Model(yielding), ROWS, detail=detail)
    forward = ["forward Model", "forward a", "forward b"]
    detailed = step_tree(forward, ["backward b", "backward a"])
    assert step.tree() == (detailed if detail == "all" else PHASES_ONLY)
