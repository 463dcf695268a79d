"""From OTLP/JSON to the wire."""

import base64
import json
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from support import run_folders as folders

from torchotel._records import Error
from torchotel.exporters.otlp.json_encoder import JsonEncoder
from torchotel.exporters.otlp.json_to_protobuf import FOREIGN, parts
from torchotel.tracing.span import Attributes, AttributeValue, Span, SpanEvent, SpanLink, SpanTemplate, Trace

RESOURCE: Attributes = {"service.name": "tränen", "torch.rank": 0, "torch.cuda": False, "list": ("a", "b")}
MANY = 10**9


def _trace() -> Trace:
    values: dict[str, AttributeValue] = {"text": "é\n", "int": -(2**63), "true": True, "half": 0.5, "tiny": 5e-324}
    rich = SpanTemplate("rich", {**values, "two": ("1x2", ""), "none": ()})
    plain = SpanTemplate("plain", {"torch.module.path": "conv"})
    event = SpanEvent("event", 7, {"torch.tensor.name": "scores"})
    spans = [
        Span(plain, 1, 0, 10, 20),
        Span(rich, 2**64 - 1, 1, 2**63, 2**63 + 1, {"own": 1}, Error("ValueError", "no"), (event,)),
        Span(plain, 3, 1, 11, 12, links=(SpanLink(5, 6, {"why": "run"}),)),
    ]
    return Trace(2**128 - 1, spans, {"torch.step.number": 4}, remote_parent=True, state="vendor=1")


def _request() -> dict[str, Any]:
    line: dict[str, Any] = json.loads(JsonEncoder(RESOURCE, "1.2").encode(_trace()))
    return line


def _as_protobuf_has_it(value: Any) -> Any:
    """Write ids in base64, which protobuf's own reader takes."""
    if isinstance(value, dict):
        ids = {"traceId", "spanId", "parentSpanId"}
        return {
            key: base64.b64encode(bytes.fromhex(item)).decode() if key in ids else _as_protobuf_has_it(item)
            for key, item in value.items()
        }
    return [_as_protobuf_has_it(item) for item in value] if isinstance(value, list) else value


def _joined(request: dict[str, Any]) -> ExportTraceServiceRequest:
    message = ExportTraceServiceRequest()
    message.ParseFromString(b"".join(part.body for part in parts(request, MANY, MANY)))
    return message


def test_says_what_protobufs_own_reader_says() -> None:
    request = _request()
    assert _joined(request) == ParseDict(_as_protobuf_has_it(request), ExportTraceServiceRequest())


def test_parts_a_request_that_is_too_large() -> None:
    request = _request()
    found = list(parts(request, 2, MANY))
    assert [part.spans for part in found] == [2, 1]
    assert [part.spans for part in parts(request, MANY, 1)] == [1, 1, 1]
    whole = _joined(request)
    spans = []
    for part in found:
        message = ExportTraceServiceRequest.FromString(part.body)
        assert message.resource_spans[0].resource == whole.resource_spans[0].resource
        spans += message.resource_spans[0].scope_spans[0].spans
    assert spans == list(whole.resource_spans[0].scope_spans[0].spans)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", float("inf")])
def test_leaves_out_a_number_that_is_not_finite(number: object) -> None:
    span = folders.span("a", 1, 0, 0, 1)
    span["attributes"] = [{"key": "bad", "value": {"doubleValue": number}}, folders.attribute("good", 1.0)]
    (resource,) = _joined(json.loads(folders.request([span]))).resource_spans
    assert [pair.key for pair in resource.scope_spans[0].spans[0].attributes] == ["good"]


def _foreign() -> list[dict[str, Any]]:
    span = folders.span("a", 1, 0, 0, 1)
    changes: list[dict[str, Any]] = [
        {"traceId": "ab"},
        {"traceId": "x" * 32},
        {"traceId": None},
        {"spanId": ["a"]},
        {"name": 5},
        {"startTimeUnixNano": -1},
        {"endTimeUnixNano": str(2**64)},
        {"endTimeUnixNano": "9" * 5000},
        {"kind": 77},
        {"flags": 2**32},
        {"status": {"code": "WRONG"}},
        {"attributes": [{"key": "a", "value": {"intValue": str(2**63)}}]},
        {"attributes": [{"key": "a", "value": {"kvlistValue": {}}}]},
        {"attributes": [{"key": "a", "value": {"stringValue": {}}}]},
        {"attributes": [{"key": {}, "value": {"stringValue": ""}}]},
        {"attributes": [{"key": "a", "value": {}}]},
        {"events": 5},
        {"links": [{}]},
    ]
    return [*({**span, **changed} for changed in changes), {"name": "no ids"}]


@pytest.mark.parametrize("span", _foreign(), ids=lambda span: list(span)[-1])
def test_refuses_what_torchotel_does_not_write(span: dict[str, Any]) -> None:
    with pytest.raises(FOREIGN):
        list(parts(json.loads(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]})), MANY, MANY))
