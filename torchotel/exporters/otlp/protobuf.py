"""Encode the parts of protobuf's wire format that OTLP needs, with OTLP's field numbers.

The field numbers are frozen in opentelemetry-proto 1.x:
https://github.com/open-telemetry/opentelemetry-proto/tree/main/opentelemetry/proto
"""

import struct
from functools import cache, lru_cache

from torchotel.exporters.sanitize import drop_nonfinite, is_int64
from torchotel.tracing.span import Attributes, AttributeValue

# Wire types: https://protobuf.dev/programming-guides/encoding/#structure
VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5

# collector/trace/v1/trace_service.proto
REQUEST_RESOURCE_SPANS = 1
# trace/v1/trace.proto
RESOURCE_SPANS_RESOURCE, RESOURCE_SPANS_SCOPE_SPANS, RESOURCE_SPANS_SCHEMA_URL = 1, 2, 3
SCOPE_SPANS_SCOPE, SCOPE_SPANS_SPANS, SCOPE_SPANS_SCHEMA_URL = 1, 2, 3
SPAN_TRACE_ID, SPAN_SPAN_ID, SPAN_TRACE_STATE, SPAN_PARENT_SPAN_ID, SPAN_NAME, SPAN_KIND = 1, 2, 3, 4, 5, 6
SPAN_START_TIME, SPAN_END_TIME, SPAN_ATTRIBUTES = 7, 8, 9
SPAN_EVENTS, SPAN_LINKS, SPAN_STATUS, SPAN_FLAGS = 11, 13, 15, 16
SPAN_DROPPED_ATTRIBUTES, SPAN_DROPPED_EVENTS, SPAN_DROPPED_LINKS = 10, 12, 14
EVENT_TIME, EVENT_NAME, EVENT_ATTRIBUTES, EVENT_DROPPED_ATTRIBUTES = 1, 2, 3, 4
LINK_TRACE_ID, LINK_SPAN_ID, LINK_TRACE_STATE, LINK_ATTRIBUTES, LINK_DROPPED_ATTRIBUTES, LINK_FLAGS = 1, 2, 3, 4, 5, 6
STATUS_MESSAGE, STATUS_CODE = 2, 3
# common/v1/common.proto
SCOPE_NAME, SCOPE_VERSION = 1, 2
KEY_VALUE_KEY, KEY_VALUE_VALUE = 1, 2
ANY_STRING, ANY_BOOL, ANY_INT, ANY_DOUBLE, ANY_ARRAY = 1, 2, 3, 4, 5
ARRAY_VALUES = 1
# resource/v1/resource.proto
RESOURCE_ATTRIBUTES = 1

KIND_INTERNAL = 1
STATUS_ERROR = 2
# enum SpanFlags
FLAG_SAMPLED, FLAG_HAS_IS_REMOTE, FLAG_IS_REMOTE = 0x01, 0x100, 0x200


def flags(*, sampled: bool, remote: bool, others: int) -> int:
    """Return the flags of a span or a link.

    Args:
        sampled: The flag of the span's or the linked context, as propagated.
        remote: Whether the span's parent or the linked span is in another process.
        others: The context's further flags, as propagated.
    """
    return FLAG_HAS_IS_REMOTE | (FLAG_SAMPLED if sampled else 0) | (FLAG_IS_REMOTE if remote else 0) | others


_UINT64_MASK = 2**64 - 1
_CONTINUE = 0x80
_DOUBLE = struct.Struct("<d").pack
_FIXED32 = struct.Struct("<I").pack
_FIXED64 = struct.Struct("<Q").pack
_ONE_BYTE = [bytes((number,)) for number in range(_CONTINUE)]
_DOUBLE_LEN = 8
_MAX_CACHED, _MAX_CACHED_TEXT = 1024, 256  # attributes whose encoding is cached, and their characters
_MAX_INT = (1 << 63) - 1


def varint(number: int) -> bytes:
    """Encode a non-negative integer with seven bits per byte, the lowest first."""
    if number < _CONTINUE:
        return _ONE_BYTE[number]
    out = bytearray()
    while number >= _CONTINUE:
        out.append(number & 0x7F | _CONTINUE)
        number >>= 7
    out.append(number)
    return bytes(out)


@cache
def tag(field: int, wire_type: int) -> bytes:
    """Encode the tag before a field's value."""
    return varint(field << 3 | wire_type)


def length_field(field: int, payload: bytes) -> bytes:
    """Encode a message, string or bytes field."""
    return tag(field, LENGTH) + varint(len(payload)) + payload


def string_field(field: int, text: str) -> bytes:
    """Encode a string field; a lone surrogate becomes a question mark."""
    return length_field(field, text.encode("utf-8", "replace"))


def varint_field(field: int, number: int) -> bytes:
    """Encode an integer, bool or enum field; negative numbers as 64-bit two's complement."""
    return tag(field, VARINT) + varint(number & _UINT64_MASK)


def fixed32_field(field: int, number: int) -> bytes:
    """Encode a fixed32 field."""
    return tag(field, FIXED32) + _FIXED32(number)


def fixed64_field(field: int, number: int) -> bytes:
    """Encode a fixed64 field."""
    return tag(field, FIXED64) + _FIXED64(number)


def any_value(value: AttributeValue) -> bytes:
    """Encode an AnyValue message; an integer beyond 64 bits becomes a string."""
    if isinstance(value, str):
        return string_field(ANY_STRING, value)
    if isinstance(value, bool):  # before int, its base class
        return varint_field(ANY_BOOL, value)
    if isinstance(value, int):
        return varint_field(ANY_INT, value) if is_int64(value) else string_field(ANY_STRING, str(value))
    if isinstance(value, float):
        return tag(ANY_DOUBLE, FIXED64) + _DOUBLE(value)
    values = (length_field(ARRAY_VALUES, string_field(ANY_STRING, text)) for text in value)
    return length_field(ANY_ARRAY, b"".join(values))


def attributes_field(field: int, attributes: Attributes) -> bytes:
    """Encode a repeated KeyValue field without non-finite numbers."""
    return b"".join([_attribute(field, key, value) for key, value in drop_nonfinite(attributes).items()])


def _attribute(field: int, key: str, value: AttributeValue) -> bytes:
    """Encode an attribute; the bytes before a number, and short texts, are cached."""
    if len(key) > _MAX_CACHED_TEXT:
        return _key_value(field, key, any_value(value))
    if type(value) is int and 0 <= value <= _MAX_INT:
        number = varint(value)
        return _before_number(field, key, len(number)) + number
    if isinstance(value, float):
        return _before_double(field, key) + _DOUBLE(value)
    if isinstance(value, str) and len(key) + len(value) <= _MAX_CACHED_TEXT:
        return _known_text(field, key, value)
    return _key_value(field, key, any_value(value))


@lru_cache(_MAX_CACHED)
def _before_double(field: int, key: str) -> bytes:
    return _key_value(field, key, any_value(0.0))[:-_DOUBLE_LEN]


@lru_cache(_MAX_CACHED)
def _before_number(field: int, key: str, number_len: int) -> bytes:
    value = tag(ANY_INT, VARINT) + bytes(number_len)
    return _key_value(field, key, value)[:-number_len]


@lru_cache(_MAX_CACHED)
def _known_text(field: int, key: str, value: str) -> bytes:
    return _key_value(field, key, any_value(value))


def _key_value(field: int, key: str, value: bytes) -> bytes:
    return length_field(field, string_field(KEY_VALUE_KEY, key) + length_field(KEY_VALUE_VALUE, value))
