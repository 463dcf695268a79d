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
    """Tell whether OTLP can say a whole number; others go as text, which loses nothing.

    Not by a range: it looks for what only derives from `int`, as an enum's member, one number after the other.
    """
    return -(2**63) <= number < 2**63


def own_attributes(span: Span) -> Attributes:
    """Give the span's own attributes, with the error's type where it failed."""
    own = span.attributes or {}
    if span.error is None or span.dropped is not None:
        return own
    return {**own, _semconv.ERROR_TYPE: span.error.type}


def own_events(span: Span) -> tuple[SpanEvent, ...]:
    """Give the span's events, with the exception where it failed."""
    if span.error is None or span.dropped is not None:
        return span.events
    attributes = {_semconv.EXCEPTION_TYPE: span.error.type}
    if span.error.message:
        attributes[_semconv.EXCEPTION_MESSAGE] = span.error.message
    return (*span.events, SpanEvent(_semconv.EVENT_EXCEPTION, span.end_ns, attributes))


def drop_nonfinite(attributes: Attributes) -> Attributes:
    """Leave non-finite numbers out: one of them makes Jaeger's search fail for every trace on the page."""
    for value in attributes.values():
        if isinstance(value, float) and not isfinite(value):
            return {k: v for k, v in attributes.items() if not isinstance(v, float) or isfinite(v)}
    return attributes


def otlp_safe(attributes: Attributes) -> dict[str, AttributeValue]:
    """Give attributes as the SDK can encode them: what OTLP can't say as it is becomes text, or is left out."""
    return {otlp_safe_text(key): _otlp_safe(value) for key, value in drop_nonfinite(attributes).items()}


def otlp_safe_text(text: str) -> str:
    """Replace what UTF-8 cannot say (a lone surrogate) by a question mark."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _otlp_safe(value: AttributeValue) -> AttributeValue:
    if isinstance(value, str):
        return otlp_safe_text(value)
    if isinstance(value, tuple):
        return tuple(map(otlp_safe_text, value))
    return str(value) if isinstance(value, int) and not is_int64(value) else value


DEFAULT_COUNT = 128


class SpanLimits(NamedTuple):
    """How many of each a span carries, and how long a text may be."""

    attributes: int = DEFAULT_COUNT
    events: int = DEFAULT_COUNT
    links: int = DEFAULT_COUNT
    event_attributes: int = DEFAULT_COUNT
    link_attributes: int = DEFAULT_COUNT
    value_length: int | None = None
    """Characters of a text, also of each in an array; None: no limit."""
    event_value_length: int | None = None
    """The same for attributes of events and links."""


DEFAULT_LIMITS = SpanLimits()


class _Cut(NamedTuple):
    template: SpanTemplate
    lost: int


class Limiter:
    """Hold traces to limits; on one thread. Those within them come out as they went in.

    Args:
        limits: What a span may carry.
        yielder: Counts spans, to yield the GIL.
    """

    def __init__(self, limits: SpanLimits, yielder: GilYielder) -> None:
        self._limits, self._yielder = limits, yielder
        self._room = limits.attributes
        """Attributes that a span has room for besides those of its trace; nearly all traces of a run have the same."""
        self._known = TemplateCache(self._cut_template)

    def hold(self, trace: Trace) -> Trace:
        """Leave out what is too much: attributes of the trace come before those of the template and the span's own."""
        common, lost = _cut(trace.attributes, self._limits.attributes, self._limits.value_length)
        room = self._limits.attributes - len(common)
        if room != self._room:
            self._room = room
            self._known.clear()
        known, spans, same = self._known, list[Span](), common is trace.attributes
        for span in self._yielder(trace.spans):
            template, _, _, _, _, own, error, events, links, _ = span
            cut = known[template]
            plain = own is None and error is None and not events and not links
            if lost or cut.lost or not (plain or self._fits(span, cut)):
                spans.append(self._hold(span, cut, lost))
                same = False
            elif cut.template is template:
                spans.append(span)
            else:
                spans.append(span._replace(template=cut.template))
                same = False
        return trace if same else replace(trace, spans=spans, attributes=common)

    def _fits(self, span: Span, cut: _Cut) -> bool:
        """Tell whether what a span has of its own may stay as it is.

        False is always right, and said of what is rare without a closer look: `_hold` then looks.
        """
        if span.error is not None or span.events or self._limits.value_length is not None:
            return False
        if span.links and (len(span.links) > self._limits.links or any(link.attributes for link in span.links)):
            return False
        return span.attributes is None or len(span.attributes) + len(cut.template.attributes) <= self._room

    def _hold(self, span: Span, cut: _Cut, lost: int) -> Span:
        limits = self._limits
        own, lost_of_own = _cut(own_attributes(span), self._room - len(cut.template.attributes), limits.value_length)
        events, links = own_events(span), span.links
        return span._replace(
            template=cut.template,
            attributes=own,
            events=tuple(map(self._hold_event, events[: limits.events])),
            links=tuple(map(self._hold_link, links[: limits.links])),
            dropped=Dropped(
                lost + cut.lost + lost_of_own,
                max(0, len(events) - limits.events),
                max(0, len(links) - limits.links),
            ),
        )

    def _hold_event(self, event: SpanEvent) -> SpanEvent:
        attributes, lost = _cut(event.attributes, self._limits.event_attributes, self._limits.event_value_length)
        return event._replace(attributes=attributes, dropped=lost)

    def _hold_link(self, link: SpanLink) -> SpanLink:
        attributes, lost = _cut(link.attributes, self._limits.link_attributes, self._limits.event_value_length)
        return link._replace(attributes=attributes, dropped=lost)

    def _cut_template(self, template: SpanTemplate) -> _Cut:
        attributes, lost = _cut(template.attributes, self._room, self._limits.value_length)
        same = attributes is template.attributes
        return _Cut(template if same else SpanTemplate(template.name, attributes), lost)


def _cut(attributes: Attributes, room: int, length: int | None) -> tuple[Attributes, int]:
    """Give the first of some attributes, and how many are left out; all of them as they are where they fit."""
    attributes = drop_nonfinite(attributes)
    if len(attributes) <= room and length is None:
        return attributes, 0
    kept = {key: _short(value, length) for key, value in islice(attributes.items(), max(0, room))}
    return kept, len(attributes) - len(kept)


def _short(value: AttributeValue, length: int | None) -> AttributeValue:
    if isinstance(value, str):
        return value[:length]
    return tuple(text[:length] for text in value) if isinstance(value, tuple) else value
