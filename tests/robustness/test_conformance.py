"""Both ways out say the same: our own OTLP encoder, and a provider with the SDK's exporter that spans are replayed to.

The same records go through each into a real receiver and are compared span by span. What may differ:

- ids, which are the provider's;
- the resource, which is the provider's own;
- the order of spans, which the SDK sends as they end, and of attributes;
- the lowest byte of the flags, which the SDK's exporter leaves empty;
- how many spans share a request.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from support.conformance_programs import PROGRAMS
from support.otlp_http_receiver import Receiver, receiver
from support.recorded_training import plain

from torchotel._records import ModelInfo, Recordable, StepRecord
from torchotel._utils.distributed import Identity
from torchotel._utils.gil import GilYielder
from torchotel.capture.recorder import Capture
from torchotel.config.otlp_endpoint import OtlpEndpoint as Endpoint
from torchotel.exporters.base import TraceExporter
from torchotel.exporters.otlp.http import HttpTransport
from torchotel.exporters.otlp.trace_exporter import RequestExporter
from torchotel.exporters.sdk.tracer_provider import TracerProviderExporter
from torchotel.sampling.detail import Detail
from torchotel.tracing.call_tree import CallTreeBuilder
from torchotel.tracing.context import current_span
from torchotel.tracing.evaluation_folding import EvaluationFold
from torchotel.tracing.ids import IdGenerator, run_reference, run_trace
from torchotel.tracing.span import SpanContextSource
from torchotel.tracing.span_templates import Templates
from torchotel.tracing.trace_builder import TraceBuilder, root_attributes, root_parent, trace_attributes

RUN = run_reference(Identity(0, 0, 2, "conformance", 0))
RESOURCE = {"service.name": "tests"}

# ---- the ways out


def records(program: Callable[[], None]) -> list[StepRecord]:
    """Run a program and give the records of its steps and evaluations."""
    handed: list[Recordable] = []
    capture = Capture(handed.append, Detail("all"), user_span=current_span)
    capture.install()
    try:
        program()
    finally:
        capture.uninstall()
        capture.end()
    return [record for one in handed if isinstance(record := one.record(), StepRecord)]


def export(units: Sequence[StepRecord], exporter: TraceExporter, starter: SpanContextSource, max_spans: int) -> None:
    """Build and export as the worker does."""
    sliced = GilYielder()
    timer, fold = CallTreeBuilder(sliced), EvaluationFold()
    builder = TraceBuilder(Templates(), max_spans, sliced)
    builder.link_steps_to(RUN)
    exporter.export(run_trace(RUN, 10**18, ModelInfo("Net", 3, 400), {"detail": "all"}, {"torch.version": "2.9"}))
    ready = [unit for record in copy.deepcopy(list(units)) for unit in fold.add(record)]
    for unit in [*ready, *fold.pop_all()]:
        attributes = root_attributes(unit, unit.reason, [])
        start_ns = unit.start_ns + unit.unix_offset_ns
        root = starter.start(
            builder.shared.root_name(unit), root_parent(unit), start_ns, {**trace_attributes(unit), **attributes}
        )
        exporter.export(builder.build(unit, timer.build(unit), root, attributes))
    assert exporter.flush(time.monotonic() + 10)
    exporter.shutdown(time.monotonic() + 10)


def by_our_encoder(units: Sequence[StepRecord], server: Receiver, max_spans: int) -> None:
    exporter = RequestExporter(HttpTransport(Endpoint(server.url), version="1.2"), resource=RESOURCE, version="1.2")
    export(units, exporter, IdGenerator("always_on"), max_spans)


def by_the_sdk(units: Sequence[StepRecord], server: Receiver, max_spans: int) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(server.url)))
    engine = TracerProviderExporter(provider, version="1.2")
    try:
        export(units, engine, engine, max_spans)
    finally:
        provider.shutdown()


# ---- what is compared


class Said(NamedTuple):
    """All that a span says, its ids resolved: comparable and sortable by its text."""

    name: str
    kind: int
    start_ns: int
    end_ns: int
    parent: object
    attributes: dict[str, Any]
    events: list[Any]
    links: list[Any]
    status: tuple[int, str]
    flags: int
    rest: tuple[Any, ...]


def said(server: Receiver) -> list[Said]:
    """Give what every span says, in the order of their times; ids become what they lead to."""
    spans = {span.span_id: span for span in server.spans}
    assert len(spans) == len(server.spans)
    return sorted((_said(span, spans) for span in spans.values()), key=repr)


def _said(span: Span, spans: dict[bytes, Span]) -> Said:
    return Said(
        span.name,
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _target(span.trace_id, span.parent_span_id, spans),
        _attributes(span.attributes),
        [(event.name, event.time_unix_nano, _attributes(event.attributes)) for event in span.events],
        [(_target(link.trace_id, link.span_id, spans), _attributes(link.attributes)) for link in span.links],
        (span.status.code, span.status.message),
        span.flags & 0x300,
        (
            span.trace_state,
            span.dropped_attributes_count,
            span.dropped_events_count,
            span.dropped_links_count,
            [(link.trace_state, link.dropped_attributes_count, link.flags >> 8) for link in span.links],
        ),
    )


def _target(trace_id: bytes, span_id: bytes, spans: dict[bytes, Span]) -> object:
    """Say which span ids lead to: the path up to its root where it came, else the ids, which are the user's."""
    if not span_id:
        return None
    if span_id not in spans:
        return trace_id.hex(), span_id.hex()
    found = spans[span_id]
    assert found.trace_id == trace_id
    return (
        found.name,
        found.start_time_unix_nano,
        found.end_time_unix_nano,
        _target(trace_id, found.parent_span_id, spans),
    )


def _attributes(entries: Iterable[Any]) -> dict[str, Any]:
    return dict(sorted((entry.key, plain(entry.value)) for entry in entries))


def scopes(server: Receiver) -> set[tuple[str, str, str]]:
    """Give name, version and schema URL of all scopes."""
    found = [
        scope for request in server.requests for one in request.message.resource_spans for scope in one.scope_spans
    ]
    return {(scope.scope.name, scope.scope.version, scope.schema_url) for scope in found}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("max_spans", [2000, 10], ids=["whole", "folded"])
def test_both_ways_out_say_the_same(program: Callable[[], None], max_spans: int) -> None:
    """Names, times, trees, attributes, events, links, status and flags of every span, and whose scope they are."""
    units = records(program)
    with receiver() as ours, receiver() as sdk:
        by_our_encoder(units, ours, max_spans)
        by_the_sdk(units, sdk, max_spans)
        assert said(sdk) == said(ours)
        assert scopes(sdk) == scopes(ours) == {("torchotel", "1.2", "https://opentelemetry.io/schemas/1.44.0")}
        assert len(ours.spans) > len(units)
