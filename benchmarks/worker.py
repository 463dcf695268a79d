"""The worker's side alone: what becomes of a step's record after training has gone on, by the span."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter_ns
from typing import cast

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from benchmarks.models import Workload
from benchmarks.replay import ways_out
from torchotel._receiver import Receiver
from torchotel._records import Record, Unit
from torchotel.capture.capture import Capture
from torchotel.capture.detail import Detail
from torchotel.exporters.otlp.encode import Envelope, SpanEncoder
from torchotel.exporters.otlp.http_transport import HttpTransport
from torchotel.exporters.otlp_json import JsonEncoder
from torchotel.telemetry.calls import Templates
from torchotel.telemetry.identities import Identities
from torchotel.telemetry.spans import Trace
from torchotel.telemetry.timing import CallTimer
from torchotel.telemetry.traces import TraceBuilder

RESOURCE = {"service.name": "bench"}


_IDENTITIES = Identities("always_on")


def _build(builder: TraceBuilder, timer: CallTimer, unit: Unit) -> Trace:
    root = _IDENTITIES.start("torch.step", None, unit.start_ns)
    return builder.build(unit, timer.time(unit), root, {})


def measure(workload: Workload, rounds: int, endpoint: str) -> dict[str, list[float]]:
    """Return µs per span of each kind of work, round by round; the kinds take turns."""
    units = _record(workload, steps=12)[2:]  # the first ones name the modules
    builder, timer = TraceBuilder(Templates(), 2000), CallTimer()
    encoder, envelope, lines = SpanEncoder(), Envelope(RESOURCE, "0"), JsonEncoder(RESOURCE, "0")
    traces = [_build(builder, timer, unit) for unit in units]
    request = envelope.wrap([encoder.encode(trace) for trace in traces])
    finished = _sdk_spans(traces)
    pack = _gzip().pack

    def each(work: Callable[[Trace], object]) -> Callable[[], object]:
        return lambda: [work(trace) for trace in traces]

    works: dict[str, Callable[[], object]] = {
        "build the trace": lambda: [_build(builder, timer, unit) for unit in units],
        "encode as protobuf": each(encoder.encode),
        "compress with gzip": lambda: pack(request),
        "encode as JSON": each(lines.encode),
        "the SDK's encoder, for comparison": lambda: encode_spans(finished).SerializeToString(),
    }
    spans = sum(len(trace.spans) for trace in traces)
    with ways_out(traces, endpoint) as sending:
        works.update(sending)
        times: dict[str, list[float]] = {name: [] for name in works}
        for round_number in range(rounds + 1):
            for name, work in works.items():
                start_ns = perf_counter_ns()
                work()
                if round_number:  # the first one fills the caches of templates
                    times[name].append((perf_counter_ns() - start_ns) / 1000 / spans)
    return times


def request_bytes_per_span(workload: Workload) -> tuple[float, float]:
    """Return the size of a request by the span, plain and compressed."""
    builder, encoder, timer = TraceBuilder(Templates(), 2000), SpanEncoder(), CallTimer()
    traces = [_build(builder, timer, unit) for unit in _record(workload, steps=12)[2:]]
    request = Envelope(RESOURCE, "0").wrap([encoder.encode(trace) for trace in traces])
    spans = sum(len(trace.spans) for trace in traces)
    return len(request) / spans, len(_gzip().pack(request)) / spans


def _record(workload: Workload, steps: int) -> list[Unit]:
    with _capturing() as units:
        for _ in range(steps):
            workload.step()
    return units


@contextmanager
def _capturing() -> Iterator[list[Unit]]:
    units: list[Unit] = []
    capture = Capture(cast("Callable[[Record], None]", units.append), Detail("all"))  # nothing is logged
    capture.install()
    yield units
    capture.uninstall()
    capture.end()


def _gzip() -> HttpTransport:
    return HttpTransport(Receiver("http://localhost:4318/v1/traces"), version="0")


def _sdk_spans(traces: Sequence[Trace]) -> tuple[ReadableSpan, ...]:
    """Make the SDK's spans of the same names, times and attributes."""
    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = provider.get_tracer("naive")
    for trace in traces:
        for span in trace.spans:
            attributes = {**span.template.attributes, **trace.attributes}
            tracer.start_span(span.template.name, attributes=attributes, start_time=span.start_ns).end(span.end_ns)
    return kept.get_finished_spans()
