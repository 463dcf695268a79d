"""One look at what leaves both ways: by torchotel to a real receiver, and by the user's own tracer."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import DEFAULT_ON

import torchotel
from support.otlp_http_receiver import receiver
from torchotel._handle import Handle

ENGINES = ["otlp", "sdk"]
"""Ours with the user's tracer beside it, or the user's provider as the engine."""


class Look:
    """The user's tracer, and one tree of what left by it and by torchotel."""

    handle: Handle

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(sampler=DEFAULT_ON)  # whatever the variable says, which is ours to heed here
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("user")
        self.spans: dict[str, tuple[str, str]] = {}
        """Name and parent by span id."""
        self.traces: dict[str, set[str]] = {}
        self.counts: dict[str, Counter[str]] = {}
        """How many spans of each name a trace has."""
        self.states: set[str] = set()
        """Trace states of our spans, but for the run's."""
        self.flags: set[int] = set()
        """Trace flags of our spans and of their links, but for the run's."""

    def add(self, name: str, trace_id: str, span_id: str, parent_id: str) -> None:
        """Take a span from either side."""
        self.spans[span_id] = (name, parent_id)
        self.traces.setdefault(trace_id, set()).add(name)
        self.counts.setdefault(trace_id, Counter())[name] += 1

    def above(self, name: str) -> list[list[str]]:
        """Give the names above each span of this name, the nearest first; every parent must be there."""
        found = []
        for own, parent in self.spans.values():
            if own == name:
                found.append(list[str]())
                above = parent
                while above:
                    found[-1].append(self.spans[above][0])
                    above = self.spans[above][1]
        return found


@contextmanager
def looked(engine: str, **settings: Any) -> Iterator[Look]:
    """Run the block under torchotel, with the user's own tracer beside it or as its engine."""
    look = Look()
    with receiver() as server:
        given: dict[str, Any] = {"detail": "all", "metrics_exporter": "none", **settings}
        if engine == "sdk":
            given["tracer_provider"] = look.provider
        look.handle = torchotel.instrument(endpoint=server.url.removesuffix("/v1/traces"), **given)
        yield look
        look.handle.shutdown()
        stats = look.handle.stats()
        assert stats["internal_errors"] == 0
        assert stats["spans_recorded"] == stats["spans_exported"] + stats["spans_sampled_out"]
        ours = [span for span in server.spans if span.name != "torch.run"]
        look.states = {span.trace_state for span in ours}
        look.flags = {found.flags & 0xFF for span in ours for found in (span, *span.links)}
        for span in server.spans:
            look.add(span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
    for ended in look.exporter.get_finished_spans():
        look.add(ended.name, *_ids(ended))


def _ids(span: ReadableSpan) -> tuple[str, str, str]:
    context = span.get_span_context()
    assert context is not None
    parent = f"{span.parent.span_id:016x}" if span.parent is not None else ""
    return f"{context.trace_id:032x}", f"{context.span_id:016x}", parent
