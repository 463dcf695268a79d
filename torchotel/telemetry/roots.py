"""The root span of a step or an evaluation: its name and what it says of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from torchotel import _names as names
from torchotel._records import LogValue, SpanReference, Unit
from torchotel.telemetry.spans import AttributeValue

ROOTS = {"step": names.SPAN_STEP, "evaluation": names.SPAN_EVALUATION, "data": names.SPAN_DATA}
"""Root spans of the kinds of records."""
KNOWN = {"loss": names.LOSS, "lr": names.LEARNING_RATE, "epoch": names.EPOCH}
"""Logged values that have an attribute of their own."""
COUNTED = ("samples", "tokens")
"""Logged values that add up over the run: they are metrics."""


def root_name(unit: Unit) -> str:
    """Return the name of the root span."""
    return ROOTS[unit.kind]


def root_parent(unit: Unit) -> SpanReference | None:
    """Return the user's span that an evaluation belongs to: one that ran with gradients off.

    Where its ids were given out before that was known, it has a trace of its own.
    """
    span = unit.user_span if unit.kind == "evaluation" and not unit.grad else None
    if span is None or (unit.identity is not None and unit.identity.trace_id != span.trace_id):
        return None
    return span


def root_attributes(unit: Unit, reason: str | None, nonfinite: Sequence[str]) -> dict[str, AttributeValue]:
    """Return what only this root has.

    Args:
        unit: The step or the evaluation.
        reason: Why it is kept.
        nonfinite: What of it went NaN or infinite.
    """
    attributes: dict[str, AttributeValue] = {names.THREAD_ID: unit.thread}
    if reason is not None:
        attributes[names.KEPT_REASON] = reason
    for name, value in unit.values.items():
        if name not in COUNTED and _says_something(value):
            attributes[KNOWN.get(name, names.LOG_PREFIX + name)] = float(value) if name in {"loss", "lr"} else value
    if unit.gradients is not None and isfinite(unit.gradients.total):
        attributes[names.GRADIENT_NORM] = unit.gradients.total
    if nonfinite:
        attributes[names.NONFINITE] = tuple(nonfinite)
    if unit.gap_ns:
        attributes[names.STEP_GAP] = unit.gap_ns / 1e9
    if unit.folded:
        attributes[names.FOLDED_EVALUATIONS] = unit.folded
        attributes[names.FOLDED_TIME] = unit.folded_ns / 1e9
    return attributes


def _says_something(value: LogValue) -> bool:
    """Tell whether a value can be written: one non-finite number breaks a search of Jaeger's."""
    return not isinstance(value, float) or isfinite(value)
