"""A compiled training beside its twin without torchotel: what was compiled, what the user was told, what came out."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch._dynamo.utils as dynamo
from torch import nn

from fidelity.training import Outcome, differences
from torchotel.testing import Captured, CapturedSpan, capture

Program = Callable[[Callable[[], object]], Outcome]
"""Calls what it is given when all is compiled that it compiles, and then trains."""
Way = Callable[..., nn.Module]
"""Compiles a model with the options of `torch.compile`, and gives what is to be called."""


def whole(model: nn.Module, **options: Any) -> nn.Module:
    """Compile the model into a module around it."""
    return cast(nn.Module, torch.compile(model, **options))


def in_place(model: nn.Module, **options: Any) -> nn.Module:
    """Compile the model as it stands."""
    model.compile(**options)
    return model


def blocks(model: nn.Module, **options: Any) -> nn.Module:
    """Put a compiled module in the place of each block; the model itself stays eager."""
    for name, block in list(model.named_children()):
        setattr(model, name, torch.compile(block, **options))
    return model


def blocks_in_place(model: nn.Module, **options: Any) -> nn.Module:
    """Compile each block as it stands."""
    for block in model.children():
        block.compile(**options)
    return model


def forward(model: nn.Module, **options: Any) -> nn.Module:
    """Compile the function that the model's call runs."""
    model.forward = torch.compile(model.forward, **options)
    return model


@dataclass(kw_only=True)
class Compilation:
    """What was compiled in a block, and what the user was told."""

    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    """Graphs, graph breaks, frames looked at and the like, as Dynamo and the backends count them."""
    compiled: list[str] = field(default_factory=list)
    """Each compilation in order: what was compiled, and why again."""
    said: list[str] = field(default_factory=list)
    """Warnings and log lines."""

    def differences(self, other: "Compilation") -> list[str]:
        """Name what is not the same in both."""
        names = sorted(self.counts.keys() | other.counts.keys())
        pairs: list[tuple[str, Any, Any]]
        pairs = [(name, self.counts.get(name, {}), other.counts.get(name, {})) for name in names]
        pairs += [("compiled", self.compiled, other.compiled), ("said", self.said, other.said)]
        return [f"{name}: {theirs} for {own}" for name, own, theirs in pairs if own != theirs]


@dataclass(kw_only=True)
class Twins:
    """A program run without torchotel and with it."""

    changed: list[str]
    """What is not the same: numbers, compilations, words to the user."""
    plain: Compilation
    captured: Captured

    @property
    def trees(self) -> list[Any]:
        """Give the names of each step's spans, as `tree`."""
        return [tree(step) for step in self.captured.steps]


def compare(program: Program, *, late: bool = False, **settings: Any) -> Twins:
    """Run a program without torchotel and with it, from when it begins or only from where it says.

    Args:
        program: What is run.
        late: Whether torchotel comes only when the program has compiled.
        **settings: As of `capture`.
    """
    with compilation() as plain:
        expected = program(lambda: None)
    with compilation() as ours, ExitStack() as stack:
        found: list[Captured] = []

        def instrument() -> None:
            found.append(stack.enter_context(capture(**{"max_spans": None, **settings})))

        if not late:
            instrument()
        outcome = program(instrument if late else lambda: None)
        (captured,) = found
        errors = captured.handle.stats()["internal_errors"]
        captured.roots  # noqa: B018  # built while it runs
    changed = differences(expected, outcome) + plain.differences(ours)
    return Twins(changed=changed + ["internal errors"] * bool(errors), plain=plain, captured=captured)


def tree(span: CapturedSpan) -> Any:
    """Give the names below a span: a name, or (name, [children]); a star is on those of compiled regions."""
    name = span.name + "*" * ("torch.compiled" in span.attributes)
    return (name, [tree(child) for child in span.children]) if span.children else name


@contextmanager
def compilation() -> Iterator[Compilation]:
    """Begin with a Dynamo that knows nothing, and note what it does in the block."""
    torch._dynamo.reset()
    dynamo.counters.clear()
    dynamo.clear_compilation_metrics()
    noted = Compilation()
    with warnings.catch_warnings(record=True) as warned, _listening(noted.said):
        warnings.simplefilter("always")
        yield noted
    noted.said += [f"{one.category.__name__}: {one.message}" for one in warned]
    noted.counts = {name: dict(counts) for name, counts in dynamo.counters.items() if counts}
    for one in dynamo.get_compilation_metrics():
        direction = "forward" if one.is_forward else "backward"
        noted.compiled.append(" ".join(filter(None, (one.co_name, direction, one.recompile_reason))))


class _Listener(logging.Handler):
    def __init__(self, said: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(f"{record.name}: {record.getMessage()}")


@contextmanager
def _listening(said: list[str]) -> Iterator[None]:
    """Hear the loggers whose records go no further, and the one that gets all others'; not torch's for traces."""
    known = [one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger)]
    ends = [logging.root, *(logger for logger in known if not logger.propagate and logger.name != "torch.__trace")]
    listener = _Listener(said)
    for logger in ends:
        logger.addHandler(listener)
    try:
        yield
    finally:
        for logger in ends:
            logger.removeHandler(listener)
