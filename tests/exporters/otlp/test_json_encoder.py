"""A line of OTLP/JSON says the same as the protobuf."""

import base64
import json
from dataclasses import replace
from typing import Any

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from support.otlp_traces import RESOURCE, T0, by_key, flat, proto, request, rich

from torchotel._utils.gil import GilYielder
from torchotel.exporters.otlp.json_encoder import JsonEncoder
from torchotel.tracing.span import Span, SpanTemplate, Trace


def read(line: bytes) -> ExportTraceServiceRequest:
    """Read a line as OTLP says: protobuf's JSON, but ids are hex."""
    document = json.loads(line, parse_constant=_refuse, object_hook=_ids_to_base64)
    message: ExportTraceServiceRequest = json_format.ParseDict(document, ExportTraceServiceRequest())
    return message


def _refuse(constant: str) -> None:
    msg = f"{constant} is not JSON"
    raise ValueError(msg)


def _ids_to_base64(value: dict[str, Any]) -> dict[str, Any]:
    ids = {k: v for k, v in value.items() if k in {"traceId", "spanId", "parentSpanId"}}
    return value | {k: base64.b64encode(bytes.fromhex(v)).decode() for k, v in ids.items()}


def ordered(message: ExportTraceServiceRequest) -> ExportTraceServiceRequest:
    return request(by_key(span) for span in message.resource_spans[0].scope_spans[0].spans)


def encoder() -> JsonEncoder:
    return JsonEncoder(RESOURCE, "1.2")


def test_whole_line() -> None:
    """One of everything reads as if OTLP's own classes had written it."""
    message = read(encoder().encode(rich()))
    assert message.resource_spans[0].resource == request([]).resource_spans[0].resource
    assert message.resource_spans[0].schema_url == "https://opentelemetry.io/schemas/1.44.0"
    assert message.resource_spans[0].scope_spans[0].schema_url == message.resource_spans[0].schema_url
    assert message.resource_spans[0].scope_spans[0].scope.name == "torchotel"
    assert ordered(message) == request(by_key(span) for span in proto(rich()))


def test_one_line() -> None:
    """A line break in a message does not break the line."""
    assert b"\n" not in encoder().encode(rich())


def test_remote_parent_and_rests() -> None:
    """Only the first span has a remote parent; there is a rest after every 64 spans, over traces."""
    rests: list[None] = []
    trace = replace(flat(100), remote_parent=True)
    resting = JsonEncoder(RESOURCE, "1.2", GilYielder(lambda: rests.append(None)))
    assert ordered(read(resting.encode(trace))) == request(by_key(span) for span in proto(trace))
    resting.encode(flat(92))
    assert len(rests) == 3


def test_without_attributes() -> None:
    """Attributes may come from any one of template, trace and span."""
    bare, named = SpanTemplate("a", {}), SpanTemplate("b", {"of": "template"})
    for common in ({}, {"of the trace": 1}):
        spans = [Span(template, 1, 0, T0, T0, own) for template in (bare, named) for own in (None, {"own": True})]
        trace = Trace(1, spans, common)
        assert ordered(read(encoder().encode(trace))) == request(by_key(span) for span in proto(trace))


def test_integers_are_strings() -> None:
    """64-bit numbers are strings, ids hex, enums numbers, as the specification demands."""
    document = json.loads(encoder().encode(flat(2)))
    span = document["resourceSpans"][0]["scopeSpans"][0]["spans"][1]
    assert {k: v for k, v in span.items() if k != "attributes"} == {
        "traceId": "00000000000000000000000000000001",
        "spanId": "0000000000000002",
        "parentSpanId": "0000000000000001",
        "flags": 257,
        "name": "forward layer1.conv",
        "kind": 1,
        "startTimeUnixNano": str(T0 + 1),
        "endTimeUnixNano": str(T0 + 2),
    }
    assert span["attributes"][-1] == {"key": "torch.step.number", "value": {"intValue": "0"}}
