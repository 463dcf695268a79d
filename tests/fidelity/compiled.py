"""A compiled training beside its twin without torchotel: what was compiled, what the user was told, what came out."""

import logging
import warnings
from collections import Counter
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

    graphs: dict[str, int] = field(default_factory=dict)
    """How many there are, and of how many operators."""
    breaks: int = 0
    """Places where a graph had to end."""
    frames: int = 0
    """Functions that Dynamo looked at."""
    compiled: Counter[str] = field(default_factory=Counter)
    """What was compiled, and why again."""
    said: Counter[str] = field(default_factory=Counter)
    """Warnings and log lines."""

    def added(self, other: "Compilation") -> list[str]:
        """Name what there is more of in the other; of graphs also what there is less of."""
        found = [f"graphs: {other.graphs}, and not {self.graphs}"] if other.graphs != self.graphs else []
        found += [f"{other.breaks} graph breaks, and not {self.breaks}"] if other.breaks > self.breaks else []
        found += [f"{other.frames} frames, and not {self.frames}"] if other.frames > self.frames else []
        return [*found, *(other.compiled - self.compiled), *(other.said - self.said)]


@dataclass(kw_only=True)
class Twins:
    """A program run without torchotel and with it."""

    changed: list[str]
    """Numbers that are not the same, and what was compiled or said in addition."""
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
    changed = differences(expected, outcome) + plain.added(ours)
    return Twins(changed=changed + ["internal errors"] * bool(errors), plain=plain, captured=captured)


def tree(span: CapturedSpan) -> Any:
    """Give the names below a span: a name, or (name, [children]); a star is on those of compiled regions.

    `torch.between` is left out, as in the trees of `support`.
    """
    name = span.name + "*" * ("torch.compiled" in span.attributes)
    below = [tree(child) for child in span.children if child.name != "torch.between"]
    return (name, below) if below else name


@contextmanager
def compilation() -> Iterator[Compilation]:
    """Begin with a Dynamo that knows nothing, and note what it does in the block."""
    torch._dynamo.reset()
    dynamo.counters.clear()
    dynamo.clear_compilation_metrics()
    noted, said = Compilation(), list[str]()
    with warnings.catch_warnings(record=True) as warned, _listening(said):
        warnings.simplefilter("always")
        yield noted
    noted.said = Counter(said + [f"{one.category.__name__}: {one.message}" for one in warned])
    noted.graphs, noted.frames = dict(dynamo.counters["stats"]), dynamo.counters["frames"]["total"]
    noted.breaks = dynamo.counters["graph_break"].total()
    for one in dynamo.get_compilation_metrics():
        direction = "forward" if one.is_forward else "backward"
        noted.compiled[" ".join(filter(None, (one.co_name, direction, one.recompile_reason)))] += 1


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
