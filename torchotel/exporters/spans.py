"""What a span carries, the same in every encoding: its error spelt out, non-finite numbers left out."""

from math import isfinite

from torchotel import _names
from torchotel.telemetry.spans import Attributes, Span, SpanEvent

INT64 = range(-(2**63), 2**63)
"""Whole numbers that OTLP can say; others go as text, which loses nothing."""


def own_attributes(span: Span) -> Attributes:
    """Give the span's own attributes, with the error's type where it failed."""
    own = span.attributes or {}
    return own if span.error is None else {**own, _names.ERROR_TYPE: span.error.type}


def own_events(span: Span) -> tuple[SpanEvent, ...]:
    """Give the span's events, with the exception where it failed."""
    if span.error is None:
        return span.events
    attributes = {
        _names.EXCEPTION_TYPE: span.error.type,
        _names.EXCEPTION_MESSAGE: span.error.message,
    }
    return (*span.events, SpanEvent(_names.EVENT_EXCEPTION, span.end_ns, attributes))


def finite(attributes: Attributes) -> Attributes:
    """Leave non-finite numbers out: one of them makes Jaeger's search fail for every trace on the page."""
    if all(not isinstance(value, float) or isfinite(value) for value in attributes.values()):
        return attributes
    return {k: v for k, v in attributes.items() if not isinstance(v, float) or isfinite(v)}
