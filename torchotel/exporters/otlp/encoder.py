"""Encode traces as OTLP's protobuf, in about a microsecond a span.

The parts that many spans share (name, kind and attributes of a template, attributes of a trace) are encoded once.
A plain span is then a few bytes of ids and times between these parts.
"""

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TypeAlias

from torchotel import _semconv
from torchotel._utils.gil import SLICE_ITEMS, GilYielder
from torchotel.exporters.base import TemplateCache
from torchotel.exporters.otlp import protobuf
from torchotel.exporters.sanitize import own_attributes, own_events
from torchotel.tracing.span import Attributes, Span, SpanEvent, SpanLink, SpanTemplate, Trace

SLICE_SPANS = 64
"""Spans that are encoded before the GIL is yielded, about 0.1 ms."""
SPAN_ITEMS = SLICE_ITEMS // SLICE_SPANS

# Fields may have any order (https://protobuf.dev/programming-guides/encoding/#order). In this order, the bytes that a
# span shares with its trace are contiguous, and so are the bytes that it shares with its template, up to the times of
# the next span: gzip compresses a span to 21 bytes, else to 25. Ids are big-endian bytes, times little-endian fixed64;
# each follows the tag of its field.
_TIMES = struct.Struct("<BQBQ").pack
_IDS = struct.Struct(">HQHQ").pack
_ROOT_ID = struct.Struct(">HQ").pack
_START, _END = 0x39, 0x41
_SPAN_ID, _PARENT_ID = 0x1208, 0x2208
_ROOT_LEN, _CHILD_LEN = 10 + 18, 20 + 18
_SPAN_TAG = protobuf.tag(protobuf.SCOPE_SPANS_SPANS, protobuf.LENGTH)
_TRACE_ID = protobuf.tag(protobuf.SPAN_TRACE_ID, protobuf.LENGTH) + protobuf.varint(16)

EncodedSpan: TypeAlias = tuple[SpanTemplate, bytes]
"""An encoded item of `ScopeSpans.spans` with its template."""


class _Encoding:
    """The bytes of a template, and the tag and length of a plain span of this template."""

    __slots__ = ("body", "head_len", "prefix")

    def __init__(self, template: SpanTemplate) -> None:
        self.body = (
            protobuf.string_field(protobuf.SPAN_NAME, template.name)
            + protobuf.varint_field(protobuf.SPAN_KIND, protobuf.KIND_INTERNAL)
            + protobuf.attributes_field(protobuf.SPAN_ATTRIBUTES, template.attributes)
        )
        self.head_len = -1
        self.prefix = b""

    def fit(self, head_len: int) -> None:
        """Set the prefix for a trace head of this length, which nearly all traces of a run have."""
        self.head_len = head_len
        self.prefix = _SPAN_TAG + protobuf.varint(head_len + _CHILD_LEN + len(self.body))


class SpanEncoder:
    """Encode traces. An object is used by one thread.

    Args:
        yielder: Counts spans, to yield the GIL.
    """

    def __init__(self, yielder: GilYielder | None = None) -> None:
        self._yielder = yielder or GilYielder()
        self._templates = TemplateCache(_Encoding)

    def encode(self, trace: Trace) -> bytes:
        """Encode a trace as repeated `ScopeSpans.spans`."""
        return b"".join(data for spans in self.slices(trace) for _, data in spans)

    def slices(self, trace: Trace) -> Iterator[list[EncodedSpan]]:
        """Encode a trace in slices, which may be sent in different requests."""
        head = _head(trace, remote=False)
        for start in range(0, len(trace.spans), SLICE_SPANS):
            spans = trace.spans[start : start + SLICE_SPANS]
            if start == 0 and trace.remote_parent:
                yield self._encoded(spans[:1], _head(trace, remote=True)) + self._encoded(spans[1:], head)
            else:
                yield self._encoded(spans, head)
            self._yielder.spend(len(spans) * SPAN_ITEMS)

    def _encoded(self, spans: Sequence[Span], head: bytes) -> list[EncodedSpan]:
        templates, head_len, join = self._templates, len(head), b"".join
        encoded: list[EncodedSpan] = []
        for span in spans:
            template, span_id, parent_id, start_ns, end_ns, attributes, error, events, links, dropped = span
            encoding = templates[template]
            times = _TIMES(_START, start_ns, _END, end_ns)
            if parent_id and attributes is None and error is None and not events and not links and dropped is None:
                if encoding.head_len != head_len:
                    encoding.fit(head_len)
                ids = _IDS(_PARENT_ID, parent_id, _SPAN_ID, span_id)
                encoded.append((template, join((encoding.prefix, times, head, ids, encoding.body))))
                continue
            own = _own(span)
            if parent_id:
                ids = _IDS(_PARENT_ID, parent_id, _SPAN_ID, span_id)
                length = head_len + _CHILD_LEN + len(encoding.body) + len(own)
            else:
                ids = _ROOT_ID(_SPAN_ID, span_id)
                length = head_len + _ROOT_LEN + len(encoding.body) + len(own)
            data = join((_SPAN_TAG, protobuf.varint(length), times, head, ids, encoding.body, own))
            encoded.append((template, data))
        return encoded


def _head(trace: Trace, *, remote: bool) -> bytes:
    flags = protobuf.flags(sampled=trace.sampled, remote=remote, others=trace.other_flags)
    return (
        _TRACE_ID
        + trace.trace_id.to_bytes(16, "big")
        + (protobuf.string_field(protobuf.SPAN_TRACE_STATE, trace.state) if trace.state else b"")
        + protobuf.fixed32_field(protobuf.SPAN_FLAGS, flags)
        + protobuf.attributes_field(protobuf.SPAN_ATTRIBUTES, trace.attributes)
    )


def _own(span: Span) -> bytes:
    """Encode the fields that are not shared with other spans."""
    pieces: list[bytes] = []
    if span.attributes or span.error is not None:
        pieces.append(protobuf.attributes_field(protobuf.SPAN_ATTRIBUTES, own_attributes(span)))
    if span.events or span.error is not None:
        pieces += [protobuf.length_field(protobuf.SPAN_EVENTS, _event(event)) for event in own_events(span)]
    for link in span.links:
        flags = protobuf.flags(sampled=link.sampled, remote=link.remote, others=link.other_flags)
        plain = not (link.attributes or link.dropped or link.state)
        pieces.append(_plain_link(link.trace_id, link.span_id, flags) if plain else _link(link, flags))
    if span.error is not None:
        status = protobuf.string_field(protobuf.STATUS_MESSAGE, span.error.message)
        status += protobuf.varint_field(protobuf.STATUS_CODE, protobuf.STATUS_ERROR)
        pieces.append(protobuf.length_field(protobuf.SPAN_STATUS, status))
    if span.dropped is not None:
        pieces.append(_count(protobuf.SPAN_DROPPED_ATTRIBUTES, span.dropped.attributes))
        pieces.append(_count(protobuf.SPAN_DROPPED_EVENTS, span.dropped.events))
        pieces.append(_count(protobuf.SPAN_DROPPED_LINKS, span.dropped.links))
    return b"".join(pieces)


def _event(event: SpanEvent) -> bytes:
    return (
        protobuf.fixed64_field(protobuf.EVENT_TIME, event.time_ns)
        + protobuf.string_field(protobuf.EVENT_NAME, event.name)
        + protobuf.attributes_field(protobuf.EVENT_ATTRIBUTES, event.attributes)
        + _count(protobuf.EVENT_DROPPED_ATTRIBUTES, event.dropped)
    )


def _link(link: SpanLink, flags: int) -> bytes:
    return protobuf.length_field(
        protobuf.SPAN_LINKS,
        protobuf.length_field(protobuf.LINK_TRACE_ID, link.trace_id.to_bytes(16, "big"))
        + protobuf.length_field(protobuf.LINK_SPAN_ID, link.span_id.to_bytes(8, "big"))
        + (protobuf.string_field(protobuf.LINK_TRACE_STATE, link.state) if link.state else b"")
        + protobuf.attributes_field(protobuf.LINK_ATTRIBUTES, link.attributes)
        + _count(protobuf.LINK_DROPPED_ATTRIBUTES, link.dropped)
        + protobuf.fixed32_field(protobuf.LINK_FLAGS, flags),
    )


@lru_cache(16)
def _plain_link(trace_id: int, span_id: int, flags: int) -> bytes:
    """Encode a link without attributes; each step has the same link to its run."""
    return _link(SpanLink(trace_id, span_id, {}), flags)


def _count(field: int, count: int) -> bytes:
    return protobuf.varint_field(field, count) if count else b""


class Envelope:
    """The parts of every request around its spans: resource, scope and schema.

    Args:
        resource: Attributes of the resource.
        version: Version of the scope.
    """

    def __init__(self, resource: Attributes, version: str) -> None:
        attributes = protobuf.attributes_field(protobuf.RESOURCE_ATTRIBUTES, resource)
        scope = protobuf.string_field(protobuf.SCOPE_NAME, _semconv.SCOPE)
        scope += protobuf.string_field(protobuf.SCOPE_VERSION, version)
        self._before = protobuf.length_field(protobuf.RESOURCE_SPANS_RESOURCE, attributes)
        # The schema of a resource does not apply to its spans, so both have one.
        schema = protobuf.string_field(protobuf.SCOPE_SPANS_SCHEMA_URL, _semconv.SCHEMA_URL)
        self._scope = protobuf.length_field(protobuf.SCOPE_SPANS_SCOPE, scope) + schema
        self._after = protobuf.string_field(protobuf.RESOURCE_SPANS_SCHEMA_URL, _semconv.SCHEMA_URL)

    def wrap(self, spans: Sequence[bytes]) -> bytes:
        """Return an `ExportTraceServiceRequest` of encoded spans."""
        spans_len = len(self._scope) + sum(map(len, spans))
        scope_spans = protobuf.tag(protobuf.RESOURCE_SPANS_SCOPE_SPANS, protobuf.LENGTH) + protobuf.varint(spans_len)
        total = len(self._before) + len(scope_spans) + spans_len + len(self._after)
        start = protobuf.tag(protobuf.REQUEST_RESOURCE_SPANS, protobuf.LENGTH) + protobuf.varint(total)
        # One join: the spans are megabytes, and nested messages would copy them again.
        return b"".join((start, self._before, scope_spans, self._scope, *spans, self._after))
