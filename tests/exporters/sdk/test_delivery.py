"""What goes into a provider comes out of it: through queues of any length, and whatever its processors do."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from opentelemetry import trace as api
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ConcurrentMultiSpanProcessor, ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.util.types import Attributes
from support.otlp_traces import CONV, T0, flat, rich
from support.sdk_provider import Kept, begun, ids
from support.senders import soon

from torchotel._records import SpanReference
from torchotel._utils.gil import GilYielder
from torchotel.exporters.base import ExportCounts
from torchotel.exporters.sdk.tracer_provider import TracerProviderExporter

# ---- nothing is lost


@pytest.mark.parametrize("queue", [1, 7, 100, 2048])
def test_a_small_queue_loses_nothing(queue: int, caplog: pytest.LogCaptureFixture) -> None:
    """Traces of 2,000 spans go through a queue of any length."""
    kept = Kept(queue=queue)
    traces = 3 if queue > 10 else 1
    for number in range(traces):
        kept.engine.export(flat(2000, number))
    assert kept.engine.flush(soon())
    assert len(kept.spans) == len({ids(span) for span in kept.spans}) == 2000 * traces
    assert kept.engine.stats.read() == ExportCounts(2000 * traces, 0, {})
    assert "dropping" not in caplog.text


def test_the_users_spans_have_room() -> None:
    """A program that ends spans of its own while we replay loses none of either."""
    kept = Kept(queue=400)
    tracer = kept.provider.get_tracer("user")
    ended: list[int] = []

    def rest() -> None:
        if len(ended) < 200:
            ended.append(1)
            tracer.start_span("query").end()

    engine = TracerProviderExporter(kept.provider, version="1.2", yielder=GilYielder(rest))
    for number in range(8):
        engine.export(flat(1000, number))
    engine.flush(soon())
    assert len([span for span in kept.spans if span.name == "query"]) == len(ended) == 200
    assert len(kept.spans) == 8200


def test_flushes_seldom() -> None:
    """Small traces gather until a slice is full."""

    class Counting(SpanProcessor):
        flushes = 0

        def force_flush(self, timeout_millis: int = 30000) -> bool:
            self.flushes += 1
            return True

    kept, counting = Kept(), Counting()
    kept.provider.add_span_processor(counting)
    for number in range(64):
        kept.engine.export(flat(16, number))
        kept.engine.push()
    assert counting.flushes == 4  # 1,024 spans; of a processor that can't be looked into 256 are risked at a time


# ---- what goes wrong


def test_a_flush_that_fails() -> None:
    """Spans that could not be flushed are counted as dropped, and `flush` says so once."""

    class Failing(SpanProcessor):
        def force_flush(self, timeout_millis: int = 30000) -> bool:
            return False

    kept = Kept()
    failing = Failing()
    kept.provider.add_span_processor(failing)
    kept.engine.export(flat(100))
    assert not kept.engine.flush(soon())
    assert kept.engine.stats.read() == ExportCounts(0, 100, {})


def test_a_flush_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    """A provider that raises at a flush costs its spans and one line in the log."""

    class Raising(SpanProcessor):
        def force_flush(self, timeout_millis: int = 30000) -> bool:
            raise OSError("no route")

    kept = Kept()
    kept.provider.add_span_processor(Raising())
    for _ in range(2):
        kept.engine.export(flat(100))
        assert not kept.engine.flush(soon())
    assert kept.engine.stats.read() == ExportCounts(0, 200, {"OSError": 2})
    assert len([record for record in caplog.records if record.name == "torchotel"]) == 1


class Hanging(SpanProcessor):
    """Flushes when the test says so."""

    def __init__(self) -> None:
        self.asked, self.answer = threading.Event(), threading.Event()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        self.asked.set()
        return self.answer.wait(10)


def test_a_flush_that_hangs() -> None:
    """A flush ends at its deadline if the exporter is slow; the next flush counts the spans."""
    kept, hanging = Kept(), Hanging()
    kept.provider.add_span_processor(hanging)
    kept.engine.export(flat(10))
    begun_s = time.monotonic()
    assert not kept.engine.flush(soon(0.05))
    assert not kept.engine.flush(soon(0.05))
    assert time.monotonic() - begun_s < 5
    assert kept.engine.stats.read() == ExportCounts(0, 0, {})
    hanging.answer.set()
    kept.engine.export(flat(10))
    assert kept.engine.flush(soon())
    assert kept.engine.stats.read() == ExportCounts(20, 0, {})


def test_shutdown_while_the_worker_waits() -> None:
    """What is being replayed then counts as dropped, once, and the worker goes no further."""
    kept, hanging = Kept(queue=100), Hanging()
    kept.provider.add_span_processor(hanging)

    def work() -> None:
        for number in range(3):
            kept.engine.export(flat(200, number))

    worker = threading.Thread(target=work)
    worker.start()
    assert hanging.asked.wait(10)
    kept.engine.shutdown(soon(0.05))
    assert kept.engine.stats.read() == ExportCounts(0, 200, {})
    hanging.answer.set()
    worker.join(10)
    assert not worker.is_alive()
    assert kept.engine.stats.read() == ExportCounts(0, 600, {})
    assert len(kept.spans) <= 200  # of the first trace, during which it waited


@pytest.mark.parametrize("moment", ["on_start", "on_end"])
def test_a_processor_that_raises(moment: str, caplog: pytest.LogCaptureFixture) -> None:
    """It costs the spans that it raised at, never the program, and one line in the log."""

    class Raising(SpanProcessor):
        def on_start(self, span: Span, parent_context: Context | None = None) -> None:
            if moment == "on_start" and span.name == CONV.name:
                raise KeyError("tenant")

        def on_end(self, span: ReadableSpan) -> None:
            if moment == "on_end" and span.name == CONV.name:
                raise KeyError("tenant")

        def force_flush(self, timeout_millis: int = 30000) -> bool:
            return True  # the base class of SDK 1.35 says nothing, which its provider takes for a failure

    kept = Kept()
    kept.provider.add_span_processor(Raising())
    kept.engine.export(flat(10))
    assert not kept.engine.flush(soon())
    assert kept.engine.flush(soon())
    assert kept.engine.stats.read() == ExportCounts(1, 9, {"KeyError": 9})
    assert len([record for record in caplog.records if record.name == "torchotel"]) == 1
    started = kept.engine.start(CONV.name, SpanReference(1, 2, sampled=True), T0)
    assert started.trace_id == 1
    assert started.sampled  # the replay counts the span


def test_a_provider_of_the_api_alone() -> None:
    """A provider without a flush, a processor or a recording span is no reason to fail."""
    engine = TracerProviderExporter(api.NoOpTracerProvider(), version="1.2")
    assert not engine.start("torch.step", None, T0).sampled
    engine.export(rich())
    assert engine.flush(soon())
    engine.shutdown(soon())
    assert engine.stats.read() == ExportCounts(0, 0, {}, sampled_out=4)


@contextmanager
def _others() -> Iterator[tuple[api.TracerProvider, InMemorySpanExporter]]:
    exporter = InMemorySpanExporter()
    inner = TracerProvider(shutdown_on_exit=False)
    inner.add_span_processor(SimpleSpanProcessor(exporter))

    class Other(api.TracerProvider):
        """A provider of somebody else's: the API and nothing else."""

        def get_tracer(
            self,
            instrumenting_module_name: str,
            instrumenting_library_version: str | None = None,
            schema_url: str | None = None,
            attributes: Attributes = None,
        ) -> api.Tracer:
            return inner.get_tracer(instrumenting_module_name, instrumenting_library_version, schema_url)

    yield Other(), exporter
    inner.shutdown()


@pytest.mark.parametrize(
    "flush",
    [None, lambda timeout_millis: None, lambda: True, lambda *, timeout_millis=1: True],
    ids=["no flush", "flush without a word", "flush without a timeout", "flush with a named timeout"],
)
def test_a_provider_of_somebody_elses(flush: object) -> None:
    """One whose `force_flush` is not there, or says nothing, gets every span, and they count as exported."""
    with _others() as (provider, exporter):
        if flush is not None:
            vars(provider)["force_flush"] = flush
        engine = TracerProviderExporter(provider, version="1.2")
        engine.export(flat(1000))
        assert engine.flush(soon())
        assert len(exporter.get_finished_spans()) == 1000
    assert engine.stats.read() == ExportCounts(1000, 0, {})


def test_a_provider_that_has_no_tracer(caplog: pytest.LogCaptureFixture) -> None:
    """A provider that raises when it is asked for a tracer costs the spans and a line in the log."""

    class Broken(api.TracerProvider):
        def get_tracer(self, *args: object, **kwargs: object) -> api.Tracer:
            raise RuntimeError("no licence")

    engine = TracerProviderExporter(Broken(), version="1.2")
    assert not engine.start("torch.step", None, T0).sampled
    assert [record.exc_text and "no licence" in record.exc_text for record in caplog.records] == [True]


def test_the_provider_lives_on() -> None:
    """After our shutdown the user's own spans are exported as before."""
    kept = Kept()
    kept.engine.export(flat(10))
    kept.engine.shutdown(soon())
    kept.provider.get_tracer("user").start_span("last").end()
    kept.provider.force_flush()
    assert kept.named("last").name == "last"


def test_whose_roots_arrived() -> None:
    """Traces are told by the provider's ids, when their roots were flushed."""
    arrived: list[int] = []
    kept = Kept()
    kept.engine.stats._on_exported = arrived.extend
    root, trace = begun(kept.engine)
    kept.engine.export(trace)
    assert arrived == []
    kept.engine.flush(soon())
    assert arrived == [root.trace_id]


def test_a_flush_of_concurrent_processors() -> None:
    """They end a flush at its timeout, which is that of the caller."""

    class Slow(InMemorySpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            time.sleep(0.05)  # the time of a request
            return super().export(spans)

    exporter = Slow()
    provider = TracerProvider(active_span_processor=ConcurrentMultiSpanProcessor(2), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    engine = TracerProviderExporter(provider, version="1.2")
    for number in range(3):
        engine.export(flat(100, number))
        assert engine.flush(soon())
    assert engine.stats.read() == ExportCounts(300, 0, {})
    assert len(exporter.get_finished_spans()) == 300
    provider.shutdown()
