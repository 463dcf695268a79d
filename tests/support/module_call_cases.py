"""Modules that are called in unusual ways, and the spans that their calls must make."""

from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from support.single_step_training import Model

Pair = namedtuple("Pair", ["first", "second"])  # noqa: PYI024  # the untyped kind is what is to be tried
ROWS = torch.arange(8.0).reshape(2, 4) / 8


@dataclass
class Answer:
    """What a model may return."""

    logits: Tensor
    aux: Tensor
    label: str = "none"

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.logits, self.aux))


class Labelled(tuple[Tensor, ...]):
    """A tuple that can't be made of its items alone, which is how full backward hooks would copy it."""

    __slots__ = ()

    def __new__(cls, label: str, tensors: Iterable[Tensor]) -> Self:
        return super().__new__(cls, tensors)


class Doubled(nn.Module):
    """Changes its own input and returns it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class FirstRow(nn.Module):
    """Returns a view of what it keeps."""

    def forward(self, x: Tensor) -> Tensor:
        self.rows = x * 2
        return self.rows[0]


class Rows(nn.Module):
    """Returns views of its input, and changes it, so that asking for their nodes raises."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        rows = x.unbind(0)
        with torch.no_grad():
            x.mul_(2)
        return rows


class Words(nn.Module):
    """Returns no tensor."""

    def forward(self, x: Tensor) -> str:
        return f"{x.ndim} dimensions"


def frozen_first(model: Any, x: Tensor) -> Any:
    with torch.no_grad():
        y = model.a(x)
    return model.b(y)


def added_in_place(model: Any, x: Tensor) -> Any:
    y = model.a(x)
    y += x
    return model.b(y)


def base_changed(model: Any, x: Tensor) -> Any:
    y = model.row(model.a(x))
    model.row.rows.mul_(3)
    return y


def rows_of_a_changed_base(model: Any, x: Tensor) -> Any:
    y = model.a(x)
    model.rows(y * 2)
    return y


def recursive(model: Any, x: Tensor, depth: int = 1) -> Any:
    y = model.a(x)
    return model(y, depth - 1) if depth else y


class Case(NamedTuple):
    """How a model is called, and what must stand below its forward and its backward span."""

    model: Callable[[], nn.Module]
    forward: list[Any]
    backward: list[Any]
    keywords: Mapping[str, Any] = MappingProxyType({"x": ROWS})


def answering(pack: Callable[[Tensor, Tensor], Any]) -> Case:
    return Case(lambda: Model(lambda m, x: pack(m.a(x), m.b(x))), ["a", "b"], ["b", "a"])


CASES = {
    "shared": Case(lambda: Model(lambda m, x: m.a(m.b(m.a(x)))), ["a", "b", "a"], ["a", "b", "a"]),
    "recursive": Case(lambda: Model(recursive), ["a", ("Model", ["a"])], [("Model", ["a"]), "a"]),
    "partly without grad": Case(lambda: Model(frozen_first), ["a", "b"], ["b"]),
    "dict": answering(lambda a, b: {"a": a, "b": b}),
    "dataclass": answering(Answer),
    "namedtuple": answering(Pair),
    "tuple subclass": answering(lambda a, b: Labelled("both", [a, b])),
    "nested": answering(lambda a, b: ([a], {"b": (b,)})),
    "keywords": Case(
        lambda: Model(lambda m, *, left, rest: m.a(input=left) + m.b(rest["right"])),
        ["a", "b"],
        ["b", "a"],
        {"left": ROWS, "rest": {"right": ROWS[:1]}},
    ),
    "integers": Case(
        lambda: Model(lambda m, x: m.a(m.table(x)), table=nn.Embedding(3, 4)),
        ["table", "a"],
        ["a", "table"],
        {"x": torch.tensor([0, 2])},
    ),
    "passes through": Case(
        lambda: Model(lambda m, x: m.none(m.off(m.a(x))), off=nn.Dropout(0.5).eval(), none=nn.Identity()),
        ["a", "off", "none"],
        ["a"],
    ),
    "view of a view changed": Case(lambda: Model(lambda m, x: m.a(x).view(-1).mul_(2)), ["a"], ["a"]),
    "added in place": Case(lambda: Model(added_in_place), ["a", "b"], ["b", "a"]),
    "added in place, three dimensions": Case(
        lambda: Model(added_in_place), ["a", "b"], ["b", "a"], {"x": ROWS.reshape(1, 2, 4)}
    ),
    "base changed": Case(lambda: Model(base_changed, row=FirstRow()), ["a", "row"], ["row", "a"]),
    "views of what changed": Case(lambda: Model(rows_of_a_changed_base, rows=Rows()), ["a", "rows"], ["a"]),
    "input changed": Case(lambda: Model(lambda m, x: m.twice(m.a(x)), twice=Doubled()), ["a", "twice"], ["twice", "a"]),
    "no tensor out": Case(
        lambda: Model(lambda m, x: m.a(x) * len(m.words(x)), words=Words()), ["a", "words"], ["a"]
    ),
    "scalar out": Case(lambda: Model(lambda m, x: m.a(x).sum()), ["a"], ["a"]),
    "jagged": Case(
        lambda: Model(lambda m, x: m.a(x).values()),
        ["a"],
        ["a"],
        {"x": torch.nested.nested_tensor([ROWS, ROWS[:1]], layout=torch.jagged)},
    ),
}  # fmt: skip
