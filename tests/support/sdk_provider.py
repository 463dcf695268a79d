"""A provider of the SDK's, an engine that replays into it, and what came out."""

import weakref
from collections.abc import Callable
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import SpanKind, TraceState
from opentelemetry.util.types import Attributes

from support.otlp_traces import CONV, STEP, T0
from torchotel._records import SpanReference
from torchotel.exporters.sdk.tracer_provider import TracerProviderExporter
from torchotel.tracing.span import Span, Trace


class Kept:
    """An engine and what came out of its provider, which is shut down with it."""

    def __init__(self, *, queue: int | None = None, **settings: Any) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False, **settings)
        batch = None if queue is None else max(1, queue // 2)
        self.provider.add_span_processor(
            BatchSpanProcessor(self.exporter, max_queue_size=queue, max_export_batch_size=batch)
        )
        self.engine = TracerProviderExporter(self.provider, version="1.2")
        weakref.finalize(self, self.provider.shutdown)

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())

    def named(self, name: str) -> ReadableSpan:
        (found,) = [span for span in self.spans if span.name == name]
        return found


class Answering(Sampler):
    """A sampler of the user's that decides on each span alone."""

    def __init__(self, answer: Callable[[str, Attributes], Decision]) -> None:
        self._answer = answer

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: object = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        return SamplingResult(self._answer(name, attributes), attributes)

    def get_description(self) -> str:
        return "answering"


def ids(span: ReadableSpan) -> SpanReference:
    assert span.context is not None
    flags = span.context.trace_flags
    return SpanReference(span.context.trace_id, span.context.span_id, flags.sampled, other_flags=flags & 0xFE)


def begun(
    engine: TracerProviderExporter, parent: SpanReference | None = None, n_spans: int = 4
) -> tuple[SpanReference, Trace]:
    """Start a root as the worker does, and give its trace."""
    root = engine.start("torch.step", parent, T0, {"torch.step.number": 7})
    above = 0 if parent is None else parent.span_id
    spans = [Span(STEP, root.span_id, above, T0, T0 + 10**6)]
    spans += [Span(CONV, i, root.span_id, T0 + i, T0 + i + 1) for i in range(1, n_spans)]
    return root, Trace(root.trace_id, spans, {"torch.step.number": 7})
