"""Convert OTLP/JSON to OTLP's protobuf, to export a run file.

protobuf's `json_format` takes 400 µs a span and reads ids as base64, while OTLP/JSON has them in hex
(https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding); this converter takes 30 µs. A value of a wrong type
raises one of `FOREIGN`. Non-finite numbers and fields that torchotel never writes are left out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from functools import lru_cache
from math import isfinite
from typing import Any, NamedTuple

from torchotel.exporters.otlp import protobuf

FOREIGN = (TypeError, ValueError, AttributeError, KeyError, OverflowError, RecursionError)
TRACE_ID_BYTES, SPAN_ID_BYTES = 16, 8
_UINT32, _UINT64, _INT64 = range(2**32), range(2**64), range(-(2**63), 2**63)
_CODES = {"STATUS_CODE_UNSET": 0, "STATUS_CODE_OK": 1, "STATUS_CODE_ERROR": 2}
_KINDS = range(6)
_MAX_CACHED_TEXT = 256
"""Characters or items of a value whose encoding is cached."""


class Part(NamedTuple):
    """Encoded spans with their resource and scope; concatenated parts are a request."""

    body: bytes
    spans: int


def parts(request: Mapping[str, Any], max_spans: int, max_bytes: int) -> Iterator[Part]:
    """Encode a request in parts of bounded size."""
    for resource in request.get("resourceSpans", ()):
        around = _resource(resource.get("resource", {}))
        schema = protobuf.string_field(protobuf.RESOURCE_SPANS_SCHEMA_URL, _text(resource.get("schemaUrl", "")))
        for scope in resource.get("scopeSpans", ()):
            inner = _scope(scope)
            for spans in _slices([_span(span) for span in scope.get("spans", ())], max_spans, max_bytes):
                scope_spans = protobuf.length_field(protobuf.RESOURCE_SPANS_SCOPE_SPANS, inner + b"".join(spans))
                body = protobuf.length_field(protobuf.REQUEST_RESOURCE_SPANS, around + scope_spans + schema)
                yield Part(body, len(spans))


def _slices(spans: Sequence[bytes], max_spans: int, max_bytes: int) -> Iterator[Sequence[bytes]]:
    chosen: list[bytes] = []
    size = 0
    for span in spans:
        if chosen and (len(chosen) >= max_spans or size + len(span) > max_bytes):
            yield chosen
            chosen, size = [], 0
        chosen.append(span)
        size += len(span)
    if chosen:
        yield chosen


def _resource(resource: Mapping[str, Any]) -> bytes:
    attributes = _attributes(protobuf.RESOURCE_ATTRIBUTES, resource.get("attributes", ()))
    return protobuf.length_field(protobuf.RESOURCE_SPANS_RESOURCE, attributes)


def _scope(scope: Mapping[str, Any]) -> bytes:
    own = scope.get("scope", {})
    name = protobuf.string_field(protobuf.SCOPE_NAME, _text(own.get("name", "")))
    version = protobuf.string_field(protobuf.SCOPE_VERSION, _text(own.get("version", "")))
    schema = protobuf.string_field(protobuf.SCOPE_SPANS_SCHEMA_URL, _text(scope.get("schemaUrl", "")))
    return protobuf.length_field(protobuf.SCOPE_SPANS_SCOPE, name + version) + schema


def _span(span: Mapping[str, Any]) -> bytes:
    parent, state = span.get("parentSpanId"), span.get("traceState")
    fields = [
        _id(protobuf.SPAN_TRACE_ID, span["traceId"], TRACE_ID_BYTES),
        _id(protobuf.SPAN_SPAN_ID, span["spanId"], SPAN_ID_BYTES),
        protobuf.string_field(protobuf.SPAN_TRACE_STATE, _text(state)) if state else b"",
        _id(protobuf.SPAN_PARENT_SPAN_ID, parent, SPAN_ID_BYTES) if parent else b"",
        protobuf.string_field(protobuf.SPAN_NAME, _text(span.get("name", ""))),
        protobuf.varint_field(protobuf.SPAN_KIND, _whole(span.get("kind", 0), _KINDS)),
        protobuf.fixed64_field(protobuf.SPAN_START_TIME, _whole(span.get("startTimeUnixNano", 0), _UINT64)),
        protobuf.fixed64_field(protobuf.SPAN_END_TIME, _whole(span.get("endTimeUnixNano", 0), _UINT64)),
        _attributes(protobuf.SPAN_ATTRIBUTES, span.get("attributes", ())),
        _messages(protobuf.SPAN_EVENTS, span.get("events", ()), _event),
        _messages(protobuf.SPAN_LINKS, span.get("links", ()), _link),
        _status(span["status"]) if span.get("status") else b"",
        protobuf.fixed32_field(protobuf.SPAN_FLAGS, _whole(span.get("flags", 0), _UINT32)),
    ]
    return protobuf.length_field(protobuf.SCOPE_SPANS_SPANS, b"".join(fields))


def _messages(field: int, items: Sequence[Mapping[str, Any]], encode: Callable[[Mapping[str, Any]], bytes]) -> bytes:
    return b"".join(protobuf.length_field(field, encode(item)) for item in items)


def _event(event: Mapping[str, Any]) -> bytes:
    return (
        protobuf.fixed64_field(protobuf.EVENT_TIME, _whole(event.get("timeUnixNano", 0), _UINT64))
        + protobuf.string_field(protobuf.EVENT_NAME, _text(event.get("name", "")))
        + _attributes(protobuf.EVENT_ATTRIBUTES, event.get("attributes", ()))
    )


def _link(link: Mapping[str, Any]) -> bytes:
    return (
        _id(protobuf.LINK_TRACE_ID, link["traceId"], TRACE_ID_BYTES)
        + _id(protobuf.LINK_SPAN_ID, link["spanId"], SPAN_ID_BYTES)
        + (protobuf.string_field(protobuf.LINK_TRACE_STATE, _text(state)) if (state := link.get("traceState")) else b"")
        + _attributes(protobuf.LINK_ATTRIBUTES, link.get("attributes", ()))
        + protobuf.fixed32_field(protobuf.LINK_FLAGS, _whole(link.get("flags", 0), _UINT32))
    )


def _status(status: Mapping[str, Any]) -> bytes:
    code = status.get("code", 0)
    message = protobuf.string_field(protobuf.STATUS_MESSAGE, _text(status.get("message", "")))
    number = _CODES[code] if isinstance(code, str) else _whole(code, range(len(_CODES)))
    return protobuf.length_field(protobuf.SPAN_STATUS, message + protobuf.varint_field(protobuf.STATUS_CODE, number))


def _attributes(field: int, pairs: Sequence[Mapping[str, Any]]) -> bytes:
    return b"".join(protobuf.length_field(field, pair) for pair in map(_key_value, pairs) if pair is not None)


def _key_value(pair: Mapping[str, Any]) -> bytes | None:
    """Encode a KeyValue; None for a non-finite number, which makes Jaeger's search fail for a whole page."""
    key = _text(pair["key"])
    ((kind, content),) = pair["value"].items()
    if kind == "arrayValue":
        content = tuple(_text(item["stringValue"]) for item in content.get("values", ()))
    if len(key) > _MAX_CACHED_TEXT or (isinstance(content, Sized) and len(content) > _MAX_CACHED_TEXT):
        return _known_key_value.__wrapped__(key, kind, content)
    return _known_key_value(key, kind, content)


@lru_cache(8192)  # attributes are the same in each step, and this function takes most of the time
def _known_key_value(key: str, kind: str, content: str | float | tuple[str, ...]) -> bytes | None:
    if kind == "stringValue" and isinstance(content, str):
        value = protobuf.any_value(content)
    elif kind == "boolValue":
        value = protobuf.any_value(bool(content))
    elif kind == "intValue":
        value = protobuf.any_value(_whole(content, _INT64))
    elif kind == "doubleValue" and not isinstance(content, tuple):
        if not isfinite(float(content)):
            return None
        value = protobuf.any_value(float(content))
    elif isinstance(content, tuple):
        value = protobuf.any_value(content)
    else:
        raise ValueError(f"{kind!s:.40} is no kind of value")
    return protobuf.string_field(protobuf.KEY_VALUE_KEY, key) + protobuf.length_field(protobuf.KEY_VALUE_VALUE, value)


def _id(field: int, text: str, length: int) -> bytes:
    raw = bytes.fromhex(text)
    if len(raw) != length:
        raise ValueError(f"{text:.40} is no id of {length} bytes")
    return protobuf.length_field(field, raw)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise TypeError(f"{value!s:.40} is no text")


def _whole(value: Any, allowed: range) -> int:
    number = int(value)
    if number not in allowed:
        raise ValueError(f"{value!s:.40} is out of range")
    return number
