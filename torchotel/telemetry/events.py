"""What happened at a moment of a step: registrations, and gradients of watched tensors."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from torchotel import _names as names
from torchotel._records import Phase, TensorGradient, Unit
from torchotel._utils.text import shortened
from torchotel.telemetry.spans import AttributeValue, SpanEvent


def registered_events(unit: Unit) -> list[SpanEvent]:
    """Return an event for each module, parameter or buffer that came while the step ran."""
    return [
        SpanEvent(
            names.EVENT_REGISTERED,
            _inside(entry.time_ns, unit) + unit.unix_offset_ns,
            {names.MODULE_PATH: shortened(entry.path), names.REGISTERED_KIND: entry.kind},
        )
        for entry in unit.registrations
    ]


def gradient_events(unit: Unit) -> dict[int, list[SpanEvent]]:
    """Return the events of watched tensors by the index of the backward phase that they stand on; -1: the root."""
    events: dict[int, list[SpanEvent]] = {}
    for gradient in unit.tensor_gradients:
        events.setdefault(_backward_at(gradient.time_ns, unit.phases), []).append(_gradient_event(gradient, unit))
    return events


def _gradient_event(gradient: TensorGradient, unit: Unit) -> SpanEvent:
    attributes: dict[str, AttributeValue] = {names.TENSOR_NAME: gradient.name, names.TENSOR_SHAPE: gradient.shape}
    if gradient.norm is not None and isfinite(gradient.norm):
        attributes[names.GRADIENT_NORM] = gradient.norm
    return SpanEvent(names.EVENT_GRADIENT, _inside(gradient.time_ns, unit) + unit.unix_offset_ns, attributes)


def _backward_at(time_ns: int, phases: Sequence[Phase]) -> int:
    """Find the innermost run of the engine at a time."""
    best = -1
    for index, phase in enumerate(phases):
        runs = phase.kind == "backward" and phase.start_ns <= time_ns <= phase.end_ns
        if runs and (best < 0 or phase.start_ns >= phases[best].start_ns):
            best = index
    return best


def _inside(time_ns: int, unit: Unit) -> int:
    return min(max(time_ns, unit.start_ns), unit.end_ns)
