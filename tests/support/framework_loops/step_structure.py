"""The structure that loops have in common: steps, phases, module calls and output types."""

from typing import NamedTuple, TypeAlias

from torchotel import _semconv as names
from torchotel.testing import Captured, CapturedSpan

Tree: TypeAlias = tuple[str, tuple["Tree", ...]]


class Structure(NamedTuple):
    """The structure of a recorded training."""

    steps: list[list[Tree]]
    """Phases of each step except fetches, the optimizer last: Lightning runs the others inside the optimizer's step."""
    evaluations: list[Tree]
    fetches: int
    """Fetches of all steps, since some loops prefetch a batch."""


def structure(captured: Captured, attribute: str = "") -> Structure:
    """Return the structure of a training; module paths omit the attribute that holds the model."""
    steps = [[_tree(phase, attribute) for phase in _phases(step)] for step in captured.steps]
    evaluations = [_tree(call, attribute) for root in captured.evaluations for call in root.children if _is_call(call)]
    fetches = sum(len(step.find_all(names.SPAN_DATA)) for step in captured.steps)
    return Structure(steps, evaluations, fetches)


def _phases(step: CapturedSpan) -> list[CapturedSpan]:
    phases = [child for child in step.children if child.name != names.SPAN_DATA]
    return sorted(phases, key=lambda phase: phase.name == names.SPAN_OPTIMIZER)


def _is_call(span: CapturedSpan) -> bool:
    return names.DIRECTION in span.attributes


def _tree(span: CapturedSpan, attribute: str) -> Tree:
    if not _is_call(span):
        return span.name, tuple(_tree(child, attribute) for child in span.children)
    path = str(span.attributes[names.MODULE_PATH])
    own = str(span.attributes[names.MODULE_TYPE]) if path == attribute else path.removeprefix(f"{attribute}.")
    types = "" if span.children else f" {span.attributes.get(names.OUTPUT_DTYPES, '')}"  # Accelerate casts it
    name = f"{span.attributes[names.DIRECTION]} {own}{types}"
    return name, tuple(_tree(child, attribute) for child in span.children)
