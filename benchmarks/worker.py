"""Cost per span of the worker's tasks on a step's record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import process_time_ns

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from benchmarks import workloads
from benchmarks.parts import Conditions, Part, Table
from benchmarks.records import Builder, record
from benchmarks.replay import complete_exports
from benchmarks.spread import Spread, spread
from benchmarks.wire import RESOURCE, gzip
from torchotel._utils.gil import GilYielder
from torchotel.exporters.otlp.encoder import Envelope, SpanEncoder
from torchotel.exporters.otlp.json_encoder import JsonEncoder
from torchotel.tracing.span import Trace

RATE = "spans/s and core"


def part(workload: str) -> Part:
    """Measure each task on the records of a workload."""
    return Part(
        "worker",
        "The worker",
        "CPU time of all threads, on the records of detailed steps of the transformer. Requests are compressed at"
        " level 1, and their responses are included.",
        lambda conditions: _measure(workload, conditions),
    )


def _measure(workload: str, conditions: Conditions) -> Table:
    units = record(workloads.make(workload), steps=2 if conditions.quick else 48)
    without_pauses = GilYielder(lambda: None)
    builder, encoder, lines = Builder(), SpanEncoder(without_pauses), JsonEncoder(RESOURCE, "0", without_pauses)
    traces = [builder.build(unit) for unit in units]
    request = Envelope(RESOURCE, "0").wrap([encoder.encode(trace) for trace in traces])
    finished = _sdk_spans(traces)
    works: dict[str, Callable[[], object]] = {
        "build the trace": lambda: [builder.build(unit) for unit in units],
        "encode as protobuf": lambda: [encoder.encode(trace) for trace in traces],
        "compress at level 1": lambda: gzip(request, 1),
        "encode as JSON": lambda: [lines.encode(trace) for trace in traces],
        "the SDK's encoder": lambda: encode_spans(finished).SerializeToString(),
    }
    spans = sum(len(trace.spans) for trace in traces)
    with complete_exports(units, conditions.sink.traces) as sending:
        times_us = _times_us({**works, **sending}, spans, conditions.rounds(15))
    conditions.sink.count()
    return {name: {"CPU µs per span": spread(each), RATE: _rate(spread(each))} for name, each in times_us.items()}


def _times_us(works: dict[str, Callable[[], object]], spans: int, rounds: int) -> dict[str, list[float]]:
    """Run the tasks in turns; the first round, which fills the template caches, is not counted."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for round_number in range(rounds + 1):
        for name, work in works.items():
            start_ns = process_time_ns()
            work()
            if round_number:
                times[name].append((process_time_ns() - start_ns) / 1000 / spans)
    return times


def _rate(us: Spread) -> Spread:
    return Spread(median=1e6 / us["median"], low=1e6 / us["high"], high=1e6 / us["low"], count=us["count"])


def _sdk_spans(traces: Sequence[Trace]) -> tuple[ReadableSpan, ...]:
    """Return SDK spans with the same names, times and attributes."""
    kept = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = provider.get_tracer("naive")
    for trace in traces:
        for span in trace.spans:
            attributes = {**span.template.attributes, **trace.attributes}
            tracer.start_span(span.template.name, attributes=attributes, start_time=span.start_ns).end(span.end_ns)
    return kept.get_finished_spans()
