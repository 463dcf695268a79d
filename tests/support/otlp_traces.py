"""Traces to encode, and what OTLP must say of them."""

from collections.abc import Iterable

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from torchotel._records import Error
from torchotel.tracing.span import Attributes, AttributeValue, Span, SpanEvent, SpanLink, SpanTemplate, Trace

T0 = 1_790_000_000_000_000_000
RESOURCE: Attributes = {"service.name": "tests", "torch.rank": 0}
CONV = SpanTemplate(
    "forward layer1.conv",
    {
        "torch.module.path": "layer1.conv",
        "torch.training": True,
        "torch.grad_enabled": False,
        "torch.module.parameters": 9408,
        "torch.input.shapes": ("8x3x224x224", "8"),
        "torch.output.shapes": (),
        "torch.device_time": 0.25,
    },
)
STEP = SpanTemplate("torch.step", {})


def rich() -> Trace:
    """Make a trace that has one of everything."""
    event = SpanEvent("torch.gradient", T0 + 5, {"torch.gradient.norm": 2.5, "bad": float("inf")})
    link = SpanLink(
        2**127 + 9,
        2**63 + 9,
        {"why": "run", "bad": float("-inf")},
        sampled=False,
        remote=True,
        state="v=1",
        other_flags=2,
    )
    own: Attributes = {
        "torch.loss": float("nan"),
        "low": -1,
        "lowest": -(2**63),
        "big": 2**63 - 1,
        "beyond": 2**63,
    }
    spans = [
        Span(STEP, 2**63 + 1, 0, T0, T0 + 900, own, events=(event,), links=(link,)),
        Span(CONV, 2, 2**63 + 1, T0 + 10, T0 + 20),
        Span(CONV, 3, 2, T0 + 11, T0 + 12, error=Error("ValueError", "no \ud800 \U0001f525 \x00\n")),
        Span(CONV, 4, 2, T0 + 13, T0 + 14, {"": "", "zero": 0, "minus": -0.0, "lone \udfff": "ß"}),
    ]
    return Trace(2**64 + 1, spans, {"torch.step.number": 300, "rate": float("nan")})


def flat(n_spans: int, number: int = 0) -> Trace:
    """Make a trace of plain spans below a root."""
    spans = [Span(STEP, 1, 0, T0, T0 + 10**6)]
    spans += [Span(CONV, i + 1, 1, T0 + i, T0 + i + 1) for i in range(1, n_spans)]
    return Trace(number + 1, spans, {"torch.step.number": number})


def request(spans: Iterable[ProtoSpan]) -> ExportTraceServiceRequest:
    """Put expected spans into the request that holds them."""
    message = ExportTraceServiceRequest()
    schema_url = "https://opentelemetry.io/schemas/1.44.0"
    resource_spans = message.resource_spans.add(schema_url=schema_url)
    resource_spans.resource.attributes.extend(attributes(RESOURCE))
    scope_spans = resource_spans.scope_spans.add(schema_url=schema_url)
    scope_spans.scope.name, scope_spans.scope.version = "torchotel", "1.2"
    scope_spans.spans.extend(spans)
    return message


def proto(trace: Trace) -> list[ProtoSpan]:
    """Write a trace with OTLP's own classes."""
    return [_span(trace, span, remote=trace.remote_parent and i == 0) for i, span in enumerate(trace.spans)]


def attributes(values: Attributes) -> list[KeyValue]:
    """Write attributes; non-finite numbers are left out."""
    return [
        KeyValue(key=_text(key), value=_value(value))
        for key, value in values.items()
        if value not in {float("inf"), float("-inf")} and value == value  # noqa: PLR0124  # NaN
    ]


def by_key(span: ProtoSpan) -> ProtoSpan:
    """Sort the attributes, whose order has no meaning."""
    copy = ProtoSpan()
    copy.CopyFrom(span)
    copy.attributes.sort(key=lambda pair: pair.key)
    return copy


def _span(trace: Trace, span: Span, *, remote: bool) -> ProtoSpan:
    own = dict(span.attributes or {})
    events = [
        ProtoSpan.Event(name=e.name, time_unix_nano=e.time_ns, attributes=attributes(e.attributes)) for e in span.events
    ]
    status = None
    if span.error:
        own["error.type"] = span.error.type
        told: Attributes = {"exception.type": span.error.type, "exception.message": span.error.message}
        events.append(ProtoSpan.Event(name="exception", time_unix_nano=span.end_ns, attributes=attributes(told)))
        status = Status(code=Status.STATUS_CODE_ERROR, message=_text(span.error.message))
    return ProtoSpan(
        trace_id=trace.trace_id.to_bytes(16, "big"),
        span_id=span.span_id.to_bytes(8, "big"),
        parent_span_id=span.parent_id.to_bytes(8, "big") if span.parent_id else b"",
        name=span.template.name,
        kind=ProtoSpan.SPAN_KIND_INTERNAL,
        start_time_unix_nano=span.start_ns,
        end_time_unix_nano=span.end_ns,
        attributes=attributes({**trace.attributes, **span.template.attributes, **own}),
        events=events,
        links=[
            ProtoSpan.Link(
                trace_id=link.trace_id.to_bytes(16, "big"),
                span_id=link.span_id.to_bytes(8, "big"),
                trace_state=link.state,
                attributes=attributes(link.attributes),
                flags=0x100 | 0x200 * link.remote | 0x01 * link.sampled | link.other_flags,
            )
            for link in span.links
        ],
        status=status,
        flags=0x301 if remote else 0x101,
    )


def _text(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _value(value: AttributeValue) -> AnyValue:
    if isinstance(value, str):
        return AnyValue(string_value=_text(value))
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value) if -(2**63) <= value < 2**63 else AnyValue(string_value=str(value))
    if isinstance(value, float):
        return AnyValue(double_value=value)
    return AnyValue(array_value=ArrayValue(values=[AnyValue(string_value=text) for text in value]))
