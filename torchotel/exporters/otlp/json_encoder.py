"""Encode traces as OTLP/JSON, one `ExportTraceServiceRequest` per line.

The format is that of OpenTelemetry's file exporter: ids in hex, 64-bit integers as strings, enums as numbers
(https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding).
"""

import json
from collections.abc import Iterable

from torchotel import _semconv
from torchotel._utils.gil import SLICE_ITEMS, GilYielder
from torchotel.exporters.base import TemplateCache
from torchotel.exporters.otlp import protobuf
from torchotel.exporters.sanitize import drop_nonfinite, is_int64, own_attributes, own_events
from torchotel.tracing.span import Attributes, AttributeValue, Span, SpanEvent, SpanLink, SpanTemplate, Trace

SPAN_ITEMS = SLICE_ITEMS // 64
"""Items that a span counts as: the GIL is yielded after 64 spans."""

# Without ASCII escapes, which double the size of names in other scripts. Quoting is a C function in both cases.
_quote = json.JSONEncoder(ensure_ascii=False).encode


class JsonEncoder:
    """Encode traces as lines. An object is used by one thread.

    Args:
        resource: Attributes of the resource.
        version: Version of the scope.
        yielder: Counts spans, to yield the GIL.
    """

    def __init__(self, resource: Attributes, version: str, yielder: GilYielder | None = None) -> None:
        self._yielder = yielder or GilYielder()
        self._templates = TemplateCache(_template)
        described = _attributes(resource)[1:]
        self._before = (
            f'{{"resourceSpans":[{{"resource":{{"attributes":[{described}]}},"scopeSpans":[{{'
            f'"scope":{{"name":{_quote(_semconv.SCOPE)},"version":{_quote(version)}}},"spans":['
        )
        schema = f'"schemaUrl":{_quote(_semconv.SCHEMA_URL)}'
        self._after = f"],{schema}}}],{schema}}}]}}"

    def encode(self, trace: Trace) -> bytes:
        """Encode a trace as one line without a line break."""
        line = self._before + ",".join(self._spans(trace)) + self._after
        # A lone surrogate, which UTF-8 cannot encode, becomes a question mark.
        return line.encode("utf-8", "replace")

    def _spans(self, trace: Trace) -> Iterable[str]:
        head = f'{{"traceId":"{trace.trace_id:032x}","spanId":"'
        common = _attributes(trace.attributes)
        state = f'"traceState":{_quote(trace.state)},' if trace.state else ""
        flags = protobuf.flags(sampled=trace.sampled, remote=trace.remote_parent, others=trace.other_flags)
        for span in trace.spans:
            template, span_id, parent_id, start_ns, end_ns, attributes, error, events, links, _ = span
            name, shared = self._templates[template]
            parent = f'"parentSpanId":"{parent_id:016x}",' if parent_id else ""
            plain = attributes is None and error is None and not events and not links
            own, extra = ("", "") if plain else (_attributes(own_attributes(span)), _extra(span))
            yield (
                f'{head}{span_id:016x}",{parent}"flags":{flags},{state}{name},'
                f'"startTimeUnixNano":"{start_ns}","endTimeUnixNano":"{end_ns}",'
                f'"attributes":[{(shared + common + own)[1:]}]{extra}}}'
            )
            flags &= ~protobuf.FLAG_IS_REMOTE
            self._yielder.spend(SPAN_ITEMS)


def _template(template: SpanTemplate) -> tuple[str, str]:
    return f'"name":{_quote(template.name)},"kind":{protobuf.KIND_INTERNAL}', _attributes(template.attributes)


def _attributes(attributes: Attributes) -> str:
    """Encode KeyValue objects, each after a comma, so that groups can be concatenated."""
    return "".join(
        f',{{"key":{_quote(key)},"value":{_any_value(value)}}}' for key, value in drop_nonfinite(attributes).items()
    )


def _any_value(value: AttributeValue) -> str:
    if isinstance(value, str):
        return f'{{"stringValue":{_quote(value)}}}'
    if isinstance(value, bool):  # before int, its base class
        return f'{{"boolValue":{"true" if value else "false"}}}'
    if isinstance(value, int):
        return f'{{"{"intValue" if is_int64(value) else "stringValue"}":"{value}"}}'
    if isinstance(value, float):
        return f'{{"doubleValue":{float.__repr__(value)}}}'
    values = ",".join(f'{{"stringValue":{_quote(text)}}}' for text in value)
    return f'{{"arrayValue":{{"values":[{values}]}}}}'


def _extra(span: Span) -> str:
    """Encode events, links and status."""
    out = ""
    if events := own_events(span):
        out += f',"events":[{",".join(map(_event, events))}]'
    if span.links:
        out += f',"links":[{",".join(map(_link, span.links))}]'
    if span.error is not None:
        out += f',"status":{{"message":{_quote(span.error.message)},"code":{protobuf.STATUS_ERROR}}}'
    return out


def _event(event: SpanEvent) -> str:
    attributes = _attributes(event.attributes)[1:]
    return f'{{"timeUnixNano":"{event.time_ns}","name":{_quote(event.name)},"attributes":[{attributes}]}}'


def _link(link: SpanLink) -> str:
    ids = f'"traceId":"{link.trace_id:032x}","spanId":"{link.span_id:016x}"'
    state = f',"traceState":{_quote(link.state)}' if link.state else ""
    flags = protobuf.flags(sampled=link.sampled, remote=link.remote, others=link.other_flags)
    return f'{{{ids}{state},"attributes":[{_attributes(link.attributes)[1:]}],"flags":{flags}}}'
