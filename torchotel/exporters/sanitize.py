"""Keep attribute values within the limits of OTLP and of the SDK."""

from dataclasses import replace
from itertools import islice
from math import isfinite
from typing import NamedTuple

from torchotel import _semconv
from torchotel._utils.gil import GilYielder
from torchotel.exporters.base import TemplateCache
from torchotel.tracing.span import Attributes, AttributeValue, Dropped, Span, SpanEvent, SpanLink, SpanTemplate, Trace


def is_int64(number: int) -> bool:
    """Return whether OTLP can encode an integer; others are exported as strings.

    A comparison and not `in range(…)`, which is a linear search for subclasses of `int` such as members of an enum.
    """
    return -(2**63) <= number < 2**63


def own_attributes(span: Span) -> Attributes:
    """Return the span's own attributes, with the error's type if the span failed."""
    own = span.attributes or {}
    if span.error is None or span.dropped is not None:
        return own
    return {**own, _semconv.ERROR_TYPE: span.error.type}


def own_events(span: Span) -> tuple[SpanEvent, ...]:
    """Return the span's events, with the exception if the span failed."""
    if span.error is None or span.dropped is not None:
        return span.events
    attributes = {_semconv.EXCEPTION_TYPE: span.error.type}
    if span.error.message:
        attributes[_semconv.EXCEPTION_MESSAGE] = span.error.message
    return (*span.events, SpanEvent(_semconv.EVENT_EXCEPTION, span.end_ns, attributes))


def drop_nonfinite(attributes: Attributes) -> Attributes:
    """Return attributes without non-finite numbers, one of which makes Jaeger's search fail for a whole page."""
    for value in attributes.values():
        if isinstance(value, float) and not isfinite(value):
            return {k: v for k, v in attributes.items() if not isinstance(v, float) or isfinite(v)}
    return attributes


def otlp_safe(attributes: Attributes) -> dict[str, AttributeValue]:
    """Return attributes that the SDK can encode: other values become strings or are left out."""
    return {otlp_safe_text(key): _otlp_safe(value) for key, value in drop_nonfinite(attributes).items()}


def otlp_safe_text(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode, by question marks."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _otlp_safe(value: AttributeValue) -> AttributeValue:
    if isinstance(value, str):
        return otlp_safe_text(value)
    if isinstance(value, tuple):
        return tuple(map(otlp_safe_text, value))
    return str(value) if isinstance(value, int) and not is_int64(value) else value


DEFAULT_COUNT = 128


class SpanLimits(NamedTuple):
    """Limits of a span."""

    attributes: int = DEFAULT_COUNT
    events: int = DEFAULT_COUNT
    links: int = DEFAULT_COUNT
    event_attributes: int = DEFAULT_COUNT
    link_attributes: int = DEFAULT_COUNT
    value_length: int | None = None
    """Characters of a string, also in an array; None: no limit."""
    event_value_length: int | None = None
    """Characters of a string in attributes of events and links."""


DEFAULT_LIMITS = SpanLimits()


class _Truncated(NamedTuple):
    template: SpanTemplate
    dropped: int


class Limiter:
    """Apply limits to traces. An object is used by one thread.

    Args:
        limits: Limits of a span.
        yielder: Counts spans, to yield the GIL.
    """

    def __init__(self, limits: SpanLimits, yielder: GilYielder) -> None:
        self._limits, self._yielder = limits, yielder
        self._room = limits.attributes
        """Attributes of a span in addition to those of its trace; the same for nearly all traces of a run."""
        self._templates = TemplateCache(self._truncate_template)

    def apply(self, trace: Trace) -> Trace:
        """Return the trace within the limits; attributes of the trace precede those of template and span."""
        common, dropped = _truncate_attributes(trace.attributes, self._limits.attributes, self._limits.value_length)
        room = self._limits.attributes - len(common)
        if room != self._room:
            self._room = room
            self._templates.clear()
        templates, spans, same = self._templates, list[Span](), common is trace.attributes
        for span in self._yielder(trace.spans):
            template, _, _, _, _, own, error, events, links, _ = span
            truncated = templates[template]
            plain = own is None and error is None and not events and not links
            if dropped or truncated.dropped or not (plain or self._fits(span, truncated)):
                spans.append(self._truncate(span, truncated, dropped))
                same = False
            elif truncated.template is template:
                spans.append(span)
            else:
                spans.append(span._replace(template=truncated.template))
                same = False
        return trace if same else replace(trace, spans=spans, attributes=common)

    def _fits(self, span: Span, truncated: _Truncated) -> bool:
        """Return False if a span's own attributes, events or links may exceed limits; `_truncate` then checks."""
        if span.error is not None or span.events or self._limits.value_length is not None:
            return False
        if span.links and (len(span.links) > self._limits.links or any(link.attributes for link in span.links)):
            return False
        return span.attributes is None or len(span.attributes) + len(truncated.template.attributes) <= self._room

    def _truncate(self, span: Span, truncated: _Truncated, dropped: int) -> Span:
        limits = self._limits
        own, dropped_of_own = _truncate_attributes(
            own_attributes(span), self._room - len(truncated.template.attributes), limits.value_length
        )
        events, links = own_events(span), span.links
        return span._replace(
            template=truncated.template,
            attributes=own,
            events=tuple(map(self._truncate_event, events[: limits.events])),
            links=tuple(map(self._truncate_link, links[: limits.links])),
            dropped=Dropped(
                dropped + truncated.dropped + dropped_of_own,
                max(0, len(events) - limits.events),
                max(0, len(links) - limits.links),
            ),
        )

    def _truncate_event(self, event: SpanEvent) -> SpanEvent:
        attributes, dropped = _truncate_attributes(
            event.attributes, self._limits.event_attributes, self._limits.event_value_length
        )
        return event._replace(attributes=attributes, dropped=dropped)

    def _truncate_link(self, link: SpanLink) -> SpanLink:
        attributes, dropped = _truncate_attributes(
            link.attributes, self._limits.link_attributes, self._limits.event_value_length
        )
        return link._replace(attributes=attributes, dropped=dropped)

    def _truncate_template(self, template: SpanTemplate) -> _Truncated:
        attributes, dropped = _truncate_attributes(template.attributes, self._room, self._limits.value_length)
        same = attributes is template.attributes
        return _Truncated(template if same else SpanTemplate(template.name, attributes), dropped)


def _truncate_attributes(attributes: Attributes, room: int, length: int | None) -> tuple[Attributes, int]:
    """Return the first attributes within the limits, and the number of those that are left out."""
    attributes = drop_nonfinite(attributes)
    if len(attributes) <= room and length is None:
        return attributes, 0
    kept = {key: _short(value, length) for key, value in islice(attributes.items(), max(0, room))}
    return kept, len(attributes) - len(kept)


def _short(value: AttributeValue, length: int | None) -> AttributeValue:
    if isinstance(value, str):
        return value[:length]
    return tuple(text[:length] for text in value) if isinstance(value, tuple) else value
