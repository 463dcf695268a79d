"""Traces through a provider of the user's: its ids, sampler, limits and processors apply, and nothing is lost."""

import random
import threading

import pytest
from opentelemetry import trace as api
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanLimits, SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.trace import SpanKind
from support.otlp_traces import CONV, STEP, T0, flat, rich
from support.sdk_provider import Kept, begun, ids
from support.senders import soon

from torchotel._records import SpanReference
from torchotel.exporters.base import ExportCounts
from torchotel.exporters.sdk.tracer_provider import MAX_STARTED
from torchotel.tracing.span import Span as OurSpan
from torchotel.tracing.span import SpanLink, Trace

# ---- what a span says


def test_a_span_is_whole() -> None:
    """Name, times, kind, attributes, events, links and status are the trace's; scope and schema are ours."""
    kept = Kept()
    kept.engine.export(rich())
    assert kept.engine.flush(soon())
    root = kept.named("torch.step")
    assert (root.start_time, root.end_time, root.kind, root.parent) == (T0, T0 + 900, SpanKind.INTERNAL, None)
    assert dict(root.attributes or {}) == {
        "torch.step.number": 300,
        "low": -1,
        "lowest": -(2**63),
        "big": 2**63 - 1,
        "beyond": str(2**63),
    }
    (event,) = root.events
    assert (event.name, event.timestamp, dict(event.attributes or {})) == (
        "torch.gradient",
        T0 + 5,
        {"torch.gradient.norm": 2.5},
    )
    (link,) = root.links
    assert (link.context.trace_id, link.context.span_id) == (2**127 + 9, 2**63 + 9)
    assert dict(link.attributes or {}) == {"why": "run"}
    (failed,) = [span for span in kept.spans if not span.status.is_unset]
    assert (failed.status.status_code, failed.status.description) == (api.StatusCode.ERROR, "no ? \U0001f525 \x00\n")
    assert (failed.attributes or {})["error.type"] == "ValueError"
    assert [(event.name, event.timestamp) for event in failed.events] == [("exception", T0 + 12)]
    scope = root.instrumentation_scope
    assert scope is not None
    assert (scope.name, scope.version, scope.schema_url) == (
        "torchotel",
        "1.2",
        "https://opentelemetry.io/schemas/1.44.0",
    )


def test_ids_are_the_providers() -> None:
    """A trace's own ids say who is whose parent, and nothing else."""
    kept = Kept()
    kept.engine.export(rich())
    kept.engine.flush(soon())
    root = kept.named("torch.step")
    inner = [span for span in kept.spans if span.parent is not None]
    by_id = {ids(span).span_id: span for span in kept.spans}
    assert {ids(span).trace_id for span in kept.spans} == {ids(root).trace_id} != {rich().trace_id}
    assert sorted(by_id[span.parent.span_id].start_time or 0 for span in inner if span.parent) == [T0, T0 + 10, T0 + 10]


def test_children_end_before_their_parents() -> None:
    """Processors see a program: spans start and end in the order of their times, one inside the other."""
    seen: list[tuple[str, int | None]] = []

    class Watch(SpanProcessor):
        def on_start(self, span: Span, parent_context: Context | None = None) -> None:
            parent = api.get_current_span(parent_context)
            assert parent.is_recording() or not parent.get_span_context().is_valid
            seen.append(("start", span.start_time))

        def on_end(self, span: ReadableSpan) -> None:
            seen.append(("end", span.end_time))

    kept = Kept()
    kept.provider.add_span_processor(Watch())
    outer, inner = OurSpan(CONV, 2, 1, T0 + 10, T0 + 50), OurSpan(CONV, 3, 2, T0 + 20, T0 + 30)
    later, first = OurSpan(CONV, 4, 1, T0 + 60, T0 + 70), OurSpan(CONV, 5, 1, T0 + 1, T0 + 2)
    kept.engine.export(Trace(1, [OurSpan(STEP, 1, 0, T0, T0 + 90), later, outer, first, inner], {}))
    assert seen == [
        ("start", T0),
        ("start", T0 + 1),
        ("end", T0 + 2),
        ("start", T0 + 10),
        ("start", T0 + 20),
        ("end", T0 + 30),
        ("end", T0 + 50),
        ("start", T0 + 60),
        ("end", T0 + 70),
        ("end", T0 + 90),
    ]


def test_a_link_to_a_trace_that_was_replayed() -> None:
    """`torch.run` gets ids of the provider's, and the links of later steps lead there."""
    kept = Kept()
    kept.engine.export(Trace(70, [OurSpan(CONV, 71, 0, T0, T0 + 1)], {}))
    kept.engine.export(Trace(80, [OurSpan(STEP, 81, 0, T0, T0 + 1, links=(SpanLink(70, 71, {}),))], {}))
    kept.engine.flush(soon())
    (link,) = kept.named("torch.step").links
    assert (link.context.trace_id, link.context.span_id) == ids(kept.named(CONV.name))[:2]


# ---- spans that are started before their trace is there


def test_a_started_span_keeps_its_ids() -> None:
    """What `start` answers is what arrives, with all that the trace says of it; its children are below it."""
    kept = Kept()
    root = kept.engine.start("torch.step", None, T0)
    inner = kept.engine.start("forward layer1.conv", root, T0 + 3)
    assert inner.trace_id == root.trace_id
    spans = [
        OurSpan(STEP, root.span_id, 0, T0, T0 + 9, {"torch.loss": 0.5}, links=(SpanLink(5, 6, {"why": "run"}),)),
        OurSpan(CONV, inner.span_id, root.span_id, T0 + 3, T0 + 8),
        OurSpan(CONV, 1, inner.span_id, T0 + 4, T0 + 5),
    ]
    kept.engine.export(Trace(root.trace_id, spans, {"torch.step.number": 2}))
    kept.engine.flush(soon())
    step = kept.named("torch.step")
    assert ids(step) == root
    assert (step.start_time, step.end_time) == (T0, T0 + 9)
    assert dict(step.attributes or {}) == {"torch.step.number": 2, "torch.loss": 0.5}
    assert [(link.context.span_id, dict(link.attributes or {})) for link in step.links] == [(6, {"why": "run"})]
    below = {span.start_time: span.parent.span_id for span in kept.spans if span.parent is not None}
    assert below == {T0 + 3: root.span_id, T0 + 4: inner.span_id}
    assert kept.engine.stats.read() == ExportCounts(3, 0, {})


def test_below_a_span_of_the_users() -> None:
    """An evaluation is in the trace of the user's span, whether that is in this process or in another."""
    for remote in (False, True):
        kept = Kept()
        parent = SpanReference(0xABC, 0xDEF, sampled=True, remote=remote)
        root, trace = begun(kept.engine, parent)
        kept.engine.export(trace)
        kept.engine.flush(soon())
        step = kept.named("torch.step")
        assert root.trace_id == 0xABC
        assert step.parent is not None
        assert (step.parent.span_id, step.parent.is_remote) == (0xDEF, remote)


def test_from_many_threads() -> None:
    """Training threads start spans while the worker replays others."""
    kept = Kept(queue=200)
    roots: list[SpanReference] = []
    traces: list[Trace] = []

    def train() -> None:
        for _ in range(100):
            root, trace = begun(kept.engine)
            roots.append(root)
            traces.append(trace)

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    replayed = 0
    while replayed < 400:
        if len(traces) > replayed:
            kept.engine.export(traces[replayed])
            replayed += 1
    for thread in threads:
        thread.join()
    assert kept.engine.flush(soon())
    assert {ids(span).span_id for span in kept.spans if span.name == "torch.step"} == {root.span_id for root in roots}
    assert len(kept.spans) == 1600


def test_started_spans_do_not_pile_up() -> None:
    """Those whose trace never comes are ended as they are, the oldest first, and all of them at the end."""
    kept = Kept(queue=2 * MAX_STARTED)  # the SDK's default of 2,048 drops spans if its thread is slow
    started = [kept.engine.start("torch.step", None, T0 + number) for number in range(MAX_STARTED + 10)]
    kept.engine.push()
    kept.provider.force_flush()
    assert [ids(span) for span in kept.spans] == started[:10]
    assert dict(kept.spans[0].attributes or {}) == {"torch.estimated": "end"}
    kept.engine.shutdown(soon())
    kept.provider.force_flush()
    assert len(kept.spans) == MAX_STARTED + 10
    assert kept.engine.stats.read() == ExportCounts(0, 0, {})  # the worker has counted their records


# ---- the provider has its way


def test_random_numbers_of_the_program_stay() -> None:
    """Ids of our spans are not drawn from the global generator; those of the program's own spans are, as without us."""
    kept = Kept()
    before = random.getstate()
    _, trace = begun(kept.engine)
    kept.engine.export(trace)
    kept.engine.export(rich())
    assert random.getstate() == before
    kept.engine.flush(soon())
    assert len({ids(span).span_id for span in kept.spans}) == len(kept.spans) == len(trace.spans) + len(rich().spans)
    random.seed(0)
    expected = RandomIdGenerator().generate_trace_id()
    random.seed(0)
    assert kept.provider.get_tracer("user").start_span("query").get_span_context().trace_id == expected
    random.setstate(before)


def _counting(base: type[IdGenerator]) -> IdGenerator:
    class Counting(base):  # type: ignore[misc, valid-type]  # of a class that is given
        """Ids as a vendor has them."""

        last = 0

        def generate_span_id(self) -> int:
            self.last += 1
            return self.last

        def generate_trace_id(self) -> int:
            return 7

    return Counting()


@pytest.mark.parametrize("base", [IdGenerator, RandomIdGenerator])
def test_an_id_generator_of_the_users_is_kept(base: type[IdGenerator]) -> None:
    """A backend may demand ids of its own form."""
    kept = Kept(id_generator=_counting(base))
    kept.engine.export(rich())
    kept.engine.flush(soon())
    assert {ids(span).trace_id for span in kept.spans} == {7}
    assert sorted(ids(span).span_id for span in kept.spans) == list(range(1, len(kept.spans) + 1))


def test_limits_are_heeded() -> None:
    """The provider's limits cut attributes, events and links, and count what they cut."""
    kept = Kept(span_limits=SpanLimits(max_span_attributes=2, max_events=0, max_links=0, max_attribute_length=5))
    kept.engine.export(rich())
    kept.engine.flush(soon())
    for span in kept.spans:
        assert len(span.attributes or {}) <= 2
        assert (list(span.events), list(span.links)) == ([], [])
        assert all(len(value) <= 5 for value in (span.attributes or {}).values() if isinstance(value, str))
    assert kept.named("torch.step").dropped_attributes == 3
    assert kept.named("torch.step").dropped_events == 1


def test_several_processors() -> None:
    """Each processor gets every span."""
    kept = Kept(queue=100)
    second = InMemorySpanExporter()
    kept.provider.add_span_processor(SimpleSpanProcessor(second))
    kept.engine.export(flat(500))
    kept.engine.flush(soon())
    assert len(kept.spans) == len(second.get_finished_spans()) == 500
