"""The sampler of the provider decides, on a root before its trace is built, and on each span."""

import pytest
import torch
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    ALWAYS_ON,
    Decision,
    ParentBased,
    TraceIdRatioBased,
)
from opentelemetry.util.types import Attributes
from support.otlp_traces import CONV, STEP, T0, flat
from support.recorded_training import train
from support.sdk_provider import Answering, Kept, begun
from support.senders import soon
from torch import nn

import torchotel
from torchotel._records import SpanReference
from torchotel.exporters.base import ExportCounts
from torchotel.tracing.span import Span as OurSpan
from torchotel.tracing.span import SpanTemplate, Trace


def test_nothing_is_sampled() -> None:
    """A sampler that takes nothing is asked once for a trace: `start` says so, and no span is left open."""
    asked: list[tuple[str, Attributes]] = []

    def never(name: str, attributes: Attributes) -> Decision:
        asked.append((name, attributes))
        return Decision.DROP

    kept = Kept(sampler=Answering(never))
    root, _ = begun(kept.engine)
    assert not root.sampled
    assert asked == [("torch.step", {"torch.step.number": 7})]
    kept.engine.shutdown(soon())
    assert kept.spans == []


def test_half_is_sampled() -> None:
    """A ratio takes whole traces or none of their spans."""
    kept = Kept(sampler=ParentBased(TraceIdRatioBased(0.5)))
    taken = 0
    for _ in range(100):
        root, trace = begun(kept.engine)
        if root.sampled:
            taken += 1
            kept.engine.export(trace)
    kept.engine.flush(soon())
    assert 20 < taken < 80
    assert len(kept.spans) == 4 * taken
    assert kept.engine.stats.read() == ExportCounts(4 * taken, 0, {})


def test_spans_lost_to_a_sampler_that_raises_are_dropped() -> None:
    """They are not counted as sampled out: the sampler made no decision."""

    def fail(name: str, attributes: Attributes) -> Decision:
        raise RuntimeError(name)

    provider = TracerProvider(sampler=Answering(fail))
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torchotel.instrument(tracer_provider=provider, prometheus_port=None, detail="all") as handle:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    stats = handle.stats()
    assert stats["spans_recorded"] == stats["spans_dropped"] > 3
    assert (stats["spans_exported"], stats["spans_sampled_out"]) == (0, 0)


@pytest.mark.parametrize("decision", [Decision.DROP, Decision.RECORD_ONLY])
def test_a_sampler_that_answers_by_the_span(decision: Decision) -> None:
    """Children that it leaves out are counted as sampled out; those below them stay in the tree."""

    def by_name(name: str, attributes: Attributes) -> Decision:
        return decision if name == CONV.name else Decision.RECORD_AND_SAMPLE

    kept = Kept(sampler=Answering(by_name))
    kept.engine.export(flat(10))
    kept.engine.flush(soon())
    assert [span.name for span in kept.spans] == ["torch.step"]
    assert kept.engine.stats.read() == ExportCounts(1, 0, {}, sampled_out=9)


def test_a_step_that_is_only_recorded() -> None:
    """The processors get the span of each step with its true end; nothing is exported."""
    ended: list[ReadableSpan] = []

    class Noting(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            ended.append(span)

    provider = TracerProvider(sampler=Answering(lambda *_: Decision.RECORD_ONLY))
    provider.add_span_processor(Noting())
    with torchotel.instrument(tracer_provider=provider, prometheus_port=None) as handle:
        train(3)
        handle.flush()
        steps = [span for span in ended if span.name == "torch.step"]
        handle.shutdown()
    assert all("torch.estimated" not in (span.attributes or {}) for span in steps)
    ends_ns = [span.end_time or 0 for span in steps]
    assert 0 < ends_ns[0] < ends_ns[1] < ends_ns[2]
    assert handle.stats()["spans_recorded"] == handle.stats()["spans_sampled_out"]


def test_a_started_span_that_is_left_out() -> None:
    """The sampler is not asked again at its replay, and the user's children and ours stay below it."""
    asked: list[str] = []

    def by_name(name: str, attributes: Attributes) -> Decision:
        asked.append(name)
        return Decision.DROP if name == "forward lost" else Decision.RECORD_AND_SAMPLE

    kept = Kept(sampler=Answering(by_name))
    root = kept.engine.start("torch.step", None, T0)
    lost = kept.engine.start("forward lost", root, T0 + 1)
    assert (root.sampled, lost.sampled) == (True, False)
    spans = [
        OurSpan(STEP, root.span_id, 0, T0, T0 + 9),
        OurSpan(SpanTemplate("forward lost", {}), lost.span_id, root.span_id, T0 + 1, T0 + 8),
        OurSpan(CONV, 1, lost.span_id, T0 + 2, T0 + 3),
    ]
    kept.engine.export(Trace(root.trace_id, spans, {}))
    kept.engine.flush(soon())
    assert asked == ["torch.step", "forward lost", CONV.name]
    parent = kept.named(CONV.name).parent
    assert parent is not None
    assert parent.span_id == lost.span_id
    assert kept.engine.stats.read() == ExportCounts(2, 0, {}, sampled_out=1)


def test_a_request_that_is_not_sampled() -> None:
    """Below a span that its sampler left out nothing is recorded."""
    kept = Kept(sampler=ParentBased(ALWAYS_ON))
    assert not kept.engine.start("torch.evaluation", SpanReference(1, 2, sampled=False), T0).sampled
    kept = Kept(sampler=ParentBased(ALWAYS_OFF))
    assert kept.engine.start("torch.evaluation", SpanReference(1, 2, sampled=True), T0).sampled
