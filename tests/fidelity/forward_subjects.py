"""Forwards written in unusual ways: what they take and give out, share, change in place and run again."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from fidelity.layer_subjects import SIDE, Applied, subject
from fidelity.subjects import Subject


class Pair(NamedTuple):
    """What a forward may give out."""

    first: Tensor
    second: Tensor


@dataclass
class Answer:
    """What else it may."""

    logits: Tensor
    hidden: list[Tensor]
    label: str = "none"


class Labelled(tuple[Tensor, ...]):
    """A tuple that can't be made of its items alone, which is how a careless hook would copy it."""

    __slots__ = ()

    def __new__(cls, label: str, tensors: Iterable[Tensor]) -> Self:
        return super().__new__(cls, tensors)


class Tagged(Tensor):
    """A subclass of tensors."""


class Doubled(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


Forward = Callable[..., Any]
"""Takes the model and what it is called with."""


def linear() -> nn.Module:
    """Make the part that most of these have."""
    return nn.Linear(SIDE, SIDE)


def block() -> nn.Module:
    """Make a part with random numbers and an operation in place."""
    return nn.Sequential(linear(), nn.ReLU(inplace=True), nn.Dropout(0.2), linear())


def subjects() -> Iterator[Subject]:
    """Yield all of them."""
    kinds = {
        "special outputs": _outputs(),
        "in-place operations": _in_place(),
        "special calls": _calls(),
        "checkpoints": _again(),
    }
    for kind, forwards in kinds.items():
        for name, run in forwards.items():
            yield subject(f"forwards with {kind}", name, partial(model_of, run))
    of = partial(subject, "forwards with special inputs")
    yield of("keywords alone", partial(model_of, _of_keywords), inputs=_keywords)
    yield of("a tensor that requires grad", partial(model_of, _plain), inputs=_requiring)


def model_of(run: Forward) -> nn.Module:
    torch.manual_seed(2)
    choices = nn.ModuleDict({"left": linear(), "right": nn.ModuleList([linear(), nn.Identity(), block()])})
    return Applied(run, a=linear(), b=block(), norm=nn.BatchNorm1d(SIDE), choices=choices, same=nn.Identity())


def _plain(m: Any, x: Tensor) -> Any:
    return m.b(m.a(x))


def _outputs() -> dict[str, Forward]:
    return {
        "mapping": lambda m, x: {"a": m.a(x), "none": None, "b": m.b(x)},
        "dataclass": lambda m, x: Answer(m.a(x), [m.b(x), x]),
        "named tuple": lambda m, x: Pair(m.a(x), m.b(x)),
        "subclass of tuple": lambda m, x: Labelled("both", [m.a(x), m.b(x)]),
        "containers in containers": lambda m, x: ([m.a(x)], {"b": (m.b(x), [x])}),
        "view": lambda m, x: m.a(x)[0].view(2, -1).t(),
        "several views of one": lambda m, x: m.a(x).unbind(0),
        "its input": lambda m, x: (x, m.a(m.same(x))),
        "subclass of tensors": lambda m, x: m.b(m.a(x).as_subclass(Tagged)),
    }


def _in_place() -> dict[str, Forward]:
    def added(m: Any, x: Tensor) -> Any:
        y = m.a(x)
        y += x
        return m.b(y)

    def of_view(m: Any, x: Tensor) -> Any:
        y = m.a(x)
        y[0].mul_(2)
        return m.b(y)

    def filled(m: Any, x: Tensor) -> Any:
        y = torch.zeros_like(x)
        y[:2] = m.a(x[:2])
        y[2:] = m.b(x[2:])
        return m.same(y)

    return {
        "output added to": added,
        "view of the output changed": of_view,
        "outputs put into one tensor": filled,
        "input changed": lambda m, x: m.b(m.a(x).sigmoid_()),
        "output of an identity changed": lambda m, x: m.b(m.same(m.a(x)).mul_(2)),
    }


def _calls() -> dict[str, Forward]:
    held_by_none: list[nn.Module] = []

    def mixed(m: Any, x: Tensor) -> Any:
        first, *rest = m.choices.right
        return m.choices.left(first(x)) + sum(part(x) for part in rest)

    def recursive(m: Any, x: Tensor, depth: int = 2) -> Any:
        y = m.a(x)
        return m(y, depth - 1) if depth else y

    def frozen(m: Any, x: Tensor) -> Any:
        with torch.no_grad():
            y = m.b(x)
        return m.a(y)

    def caught(m: Any, x: Tensor) -> Any:
        try:
            return m.norm(m.a(x)[0])  # one row is not a batch
        except ValueError:
            return m.norm(m.a(x))

    def made(m: Any, x: Tensor) -> Any:
        return nn.Tanh()(m.a(x))

    def in_list(m: Any, x: Tensor) -> Any:
        held_by_none[:] = held_by_none or [nn.Tanh()]
        return held_by_none[0](m.a(x))

    return {
        "one module many times": lambda m, x: m.a(m.b(m.a(m.same(m.a(x))))),
        "lists and mappings of modules": mixed,
        "itself": recursive,
        "without grad": frozen,
        "one that raises": caught,
        "one made in the forward": made,
        "one in a plain list": in_list,
        "detached": lambda m, x: m.b(m.a(x).detach()) + m.a(x),
        "for nothing": lambda m, x: (m.b(x), m.a(x))[1],
        "function with its own backward": lambda m, x: m.b(Doubled.apply(m.a(x))),
        "functional_call": lambda m, x: functional_call(m.a, {"weight": torch.eye(SIDE)}, (m.a(x),)),
        "hook on a gradient": _hooked,
    }


def _hooked(m: Any, x: Tensor) -> Any:
    y = m.a(x)
    y.register_hook(lambda gradient: gradient * 2)
    return m.b(y)


def _again() -> dict[str, Forward]:
    ways = {}
    for reentrant in (False, True):
        for name, run in _checkpointed(reentrant=reentrant).items():
            ways[f"{name}, {'' if reentrant else 'not '}reentrant"] = run
    return ways


def _checkpointed(*, reentrant: bool) -> dict[str, Forward]:
    again = partial(checkpoint, use_reentrant=reentrant)
    return {
        "part": lambda m, x: m.a(again(m.b, m.a(x))),
        "all": lambda m, x: again(lambda y: m.a(m.b(y)), x.requires_grad_()),
        "one twice": lambda m, x: again(m.b, again(m.b, m.a(x))),
        "one within another": lambda m, x: again(lambda y: m.a(again(m.b, y)), m.a(x)),
        "sequence": lambda m, x: checkpoint_sequential(m.b, 2, m.a(x), use_reentrant=reentrant),
    }


def _of_keywords(m: Any, *, left: Tensor, rest: dict[str, Tensor]) -> Any:
    return m.a(input=left) + m.b(rest["right"])


def _keywords() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (), {"left": torch.randn(3, SIDE), "rest": {"right": torch.randn(3, SIDE)}}


def _requiring() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(3, SIDE).requires_grad_(),), {}
