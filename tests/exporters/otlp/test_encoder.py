"""What our encoder writes is what OTLP's own classes read."""

from dataclasses import replace
from enum import IntEnum

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan
from support.otlp_traces import RESOURCE, T0, by_key, flat, proto, request, rich

from torchotel._utils.gil import GilYielder
from torchotel.exporters.base import TemplateCache
from torchotel.exporters.otlp import protobuf
from torchotel.exporters.otlp.encoder import Envelope, SpanEncoder
from torchotel.tracing.span import Span, SpanTemplate, Trace


class Colour(IntEnum):
    """A number that is more than one."""

    RED = 3


def read(encoder: SpanEncoder, *traces: Trace) -> ExportTraceServiceRequest:
    body = Envelope(RESOURCE, "1.2").wrap([encoder.encode(trace) for trace in traces])
    message = ExportTraceServiceRequest()
    message.ParseFromString(body)
    spans = message.resource_spans[0].scope_spans[0].spans
    ordered = [by_key(span) for span in spans]
    del spans[:]
    spans.extend(ordered)
    return message


def expected(*traces: Trace) -> ExportTraceServiceRequest:
    return request(by_key(span) for trace in traces for span in proto(trace))


def test_whole_request() -> None:
    """One of everything reads as if OTLP's own classes had written it; there is nothing unknown in it."""
    assert read(SpanEncoder(), rich()) == expected(rich())


def test_traces_share_templates() -> None:
    """Traces whose common attributes differ in length use the same templates."""
    traces = [rich(), flat(5, 1), flat(5, 70_000), flat(5, 2)]
    assert read(SpanEncoder(), *traces) == expected(*traces)


def test_remote_parent() -> None:
    """Only the first span says that its parent is in another process."""
    spans = [Span(SpanTemplate("torch.step rank 1", {}), 1, 77, T0, T0 + 9), *flat(4).spans[1:]]
    trace = Trace(1, spans, {}, remote_parent=True)
    message = read(SpanEncoder(), trace)
    assert message == expected(trace)
    assert [span.flags for span in message.resource_spans[0].scope_spans[0].spans] == [
        0x301,
        0x101,
        0x101,
        0x101,
    ]


def test_nonfinite_numbers_are_left_out() -> None:
    """NaN and infinities appear nowhere, in attributes, events or links."""
    root = read(SpanEncoder(), rich()).resource_spans[0].scope_spans[0].spans[0]
    assert [pair.key for pair in root.attributes] == ["beyond", "big", "low", "lowest", "torch.step.number"]
    assert [pair.key for pair in root.events[0].attributes] == ["torch.gradient.norm"]
    assert [pair.key for pair in root.links[0].attributes] == ["why"]


def test_nothing() -> None:
    """A trace without spans is no bytes."""
    assert SpanEncoder().encode(Trace(1, [], {})) == b""


def test_slices() -> None:
    """A large trace comes in slices that make the whole, with a rest after each full one."""
    rests: list[None] = []
    trace = replace(flat(1000), remote_parent=True)
    slices = list(SpanEncoder(GilYielder(lambda: rests.append(None))).slices(trace))
    assert [len(spans) for spans in slices] == [64] * 15 + [40]
    assert len(rests) == 15
    assert b"".join(data for spans in slices for _, data in spans) == SpanEncoder().encode(trace)
    assert read(SpanEncoder(), trace) == expected(trace)


def test_cache_is_bounded() -> None:
    """Ever new templates do not stay for ever, and a known one is not encoded again."""
    made: list[str] = []
    cache = TemplateCache(lambda template: made.append(template.name), limit=2)
    one, two, three = (SpanTemplate(name, {}) for name in ("one", "two", "three"))
    for template in (one, one, two, three, one):
        cache[template]
    assert made == ["one", "two", "three", "one"]
    assert set(cache) == {three, one}


NUMBERS = [0, 127, 128, 1 << 32, (1 << 63) - 1, -1, -(1 << 63), 1 << 63, 1 << 64, True, Colour.RED]


@pytest.mark.parametrize("value", NUMBERS)
def test_whole_numbers(value: int) -> None:
    """Each arrives as it is, those that OTLP can't say as text."""
    (attribute,) = ProtoSpan.FromString(protobuf.attributes_field(protobuf.SPAN_ATTRIBUTES, {"n": value})).attributes
    kind = attribute.value.WhichOneof("value")
    told = getattr(attribute.value, str(kind))
    expected = "bool_value" if value is True else "int_value" if -(1 << 63) <= value < 1 << 63 else "string_value"
    assert (kind, int(told)) == (expected, value)


def test_long_texts_are_not_kept() -> None:
    """Messages of exceptions may be some thousand characters, and never come twice."""
    kept = protobuf._known_text.cache_info().currsize
    for number in range(10):
        protobuf.attributes_field(protobuf.SPAN_ATTRIBUTES, {"exception.message": f"{number}" * 1000})
    assert protobuf._known_text.cache_info().currsize == kept
