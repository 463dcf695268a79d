"""What a span carries, the same in every encoding: its error spelt out, non-finite numbers left out."""

from math import isfinite

from torchotel import _names
from torchotel.tracing.span import Attributes, AttributeValue, Span, SpanEvent


def is_int64(number: int) -> bool:
    """Tell whether OTLP can say a whole number; others go as text, which loses nothing.

    Not by a range: it looks for what only derives from `int`, as an enum's member, one number after the other.
    """
    return -(2**63) <= number < 2**63


def own_attributes(span: Span) -> Attributes:
    """Give the span's own attributes, with the error's type where it failed."""
    own = span.attributes or {}
    if span.error is None or span.dropped is not None:
        return own
    return {**own, _names.ERROR_TYPE: span.error.type}


def own_events(span: Span) -> tuple[SpanEvent, ...]:
    """Give the span's events, with the exception where it failed."""
    if span.error is None or span.dropped is not None:
        return span.events
    attributes = {_names.EXCEPTION_TYPE: span.error.type}
    if span.error.message:
        attributes[_names.EXCEPTION_MESSAGE] = span.error.message
    return (*span.events, SpanEvent(_names.EVENT_EXCEPTION, span.end_ns, attributes))


def finite(attributes: Attributes) -> Attributes:
    """Leave non-finite numbers out: one of them makes Jaeger's search fail for every trace on the page."""
    for value in attributes.values():
        if isinstance(value, float) and not isfinite(value):
            return {k: v for k, v in attributes.items() if not isinstance(v, float) or isfinite(v)}
    return attributes


def speakable(attributes: Attributes) -> dict[str, AttributeValue]:
    """Give attributes as the SDK can encode them: what OTLP can't say as it is becomes text, or is left out."""
    return {speakable_text(key): _speakable(value) for key, value in finite(attributes).items()}


def speakable_text(text: str) -> str:
    """Replace what UTF-8 cannot say (a lone surrogate) by a question mark."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _speakable(value: AttributeValue) -> AttributeValue:
    if isinstance(value, str):
        return speakable_text(value)
    if isinstance(value, tuple):
        return tuple(map(speakable_text, value))
    return str(value) if isinstance(value, int) and not is_int64(value) else value
