"""A provider that is slow, or whose endpoint is down, delays neither the worker nor the other exporters."""

import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.util.types import Attributes
from support.otlp_traces import flat
from support.prometheus_server import until
from support.recorded_training import train
from support.scraped_metrics import scrape, value
from support.sdk_provider import Answering, Kept
from support.senders import soon

import torchotel
from torchotel._utils.faults import Guard
from torchotel.exporters.base import ExportCounts
from torchotel.exporters.sdk import replay_thread, tracer_provider
from torchotel.exporters.sdk.replay_thread import ReplayThread


class Waiting(SpanExporter):
    """Accepts spans when the test allows it."""

    def __init__(self) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()
        self.n_spans = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked.set()
        self.go_on.wait(30)
        self.n_spans += len(spans)
        return SpanExportResult.SUCCESS


def batched(exporter: SpanExporter) -> SpanProcessor:
    return BatchSpanProcessor(exporter, max_queue_size=100, max_export_batch_size=50)


def export_to(kept: Kept, exporter: Waiting, *, traces: int, spans: int) -> ReplayThread:
    """Export traces: the first one is in the exporter, which waits, and the others are in the thread's queue."""
    kept.provider.add_span_processor(SimpleSpanProcessor(exporter))
    thread = ReplayThread(kept.engine, Guard("a test"))
    for number in range(traces):
        thread.export(flat(spans, number))
        assert exporter.asked.wait(10)
    return thread


@pytest.mark.parametrize("processor", [batched, SimpleSpanProcessor])
def test_metrics_and_run_file_go_on(
    processor: Callable[[SpanExporter], SpanProcessor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They have every step while the exporter waits, and after the shutdown each span is counted."""
    exporter, provider = Waiting(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor(exporter))
    folder = tmp_path / "run"
    with torchotel.instrument(tracer_provider=provider, detail="all", record=folder) as handle:
        train(50)
        assert not handle.flush(1)
        assert exporter.asked.is_set()
        assert value(scrape(handle.prometheus_port).series, "torch_steps_total") == 50
        handle.shutdown(1)
        stats = handle.stats()
    exporter.go_on.set()
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == stats["steps"] == 50
    assert stats["spans_recorded"] == stats["spans_dropped"] + stats["spans_exported"] > 50
    unsent = re.compile(r"the TracerProvider did not process (\d+) spans before the deadline of shutdown")
    (found,) = filter(None, map(unsent.match, caplog.messages))
    assert 0 < int(found[1]) <= stats["spans_dropped"]


def test_a_slow_exporter_loses_nothing() -> None:
    """Traces wait for it, and a flush or a shutdown waits for them."""
    exporter, provider = Waiting(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(batched(exporter))
    with torchotel.instrument(tracer_provider=provider, detail="all", prometheus_port=None) as handle:
        train(50)
        assert not handle.flush(0.5)
        exporter.go_on.set()
        assert handle.flush(30)
        train(50)
        handle.shutdown(30)
        stats = handle.stats()
    assert exporter.n_spans == stats["spans_recorded"] == stats["spans_exported"] > 500
    provider.shutdown()


def test_the_oldest_traces_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait are bounded by their spans, and the next flush reports the loss."""
    monkeypatch.setattr(replay_thread, "MAX_BUFFER_SPANS", 350)
    kept, exporter = Kept(), Waiting()
    thread = export_to(kept, exporter, traces=6, spans=100)
    assert kept.engine.stats.read() == ExportCounts(0, 200, {}, dropped_queue=200)
    exporter.go_on.set()
    assert not thread.flush(soon())
    assert thread.flush(soon())
    thread.shutdown(soon())
    thread.export(flat(100, 6))
    assert kept.engine.stats.read() == ExportCounts(400, 300, {}, dropped_queue=200)


def test_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 starts no thread at its end: the caller replays, and each span is counted."""
    kept = Kept()
    thread = ReplayThread(kept.engine, Guard("a test"))

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for number in range(3):
        thread.export(flat(10, number))
    assert thread.flush(soon())
    thread.export(flat(10, 3))
    thread.shutdown(soon())
    thread.export(flat(10, 4))
    assert kept.engine.stats.read() == ExportCounts(40, 10, {})


class Leaving(SpanProcessor):
    """Ends its thread at the third call of one of its methods, as a library that calls `sys.exit()` does."""

    def __init__(self, moment: str, error: type[BaseException]) -> None:
        self.moment, self.error, self.n_calls = moment, error, 0

    def called(self, moment: str) -> None:
        if moment == self.moment:
            self.n_calls += 1
            if self.n_calls == 3:
                raise self.error

    def on_start(self, span: ReadableSpan, parent_context: object = None) -> None:
        self.called("start")

    def on_end(self, span: ReadableSpan) -> None:
        self.called("end")

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        self.called("flush")
        return True


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize(("moment", "dropped"), [("start", 1), ("end", 1), ("flush", 10)])
def test_a_processor_that_ends_its_thread(moment: str, dropped: int, error: type[BaseException]) -> None:
    """The spans of one call are dropped; the thread replays the other spans."""
    kept = Kept()
    kept.provider.add_span_processor(Leaving(moment, error))
    thread = ReplayThread(kept.engine, Guard("a test"))
    for number in range(5):
        thread.export(flat(10, number))
        thread.flush(soon())
    assert kept.engine.stats.read() == ExportCounts(50 - dropped, dropped, {error.__name__: 1})
    thread.shutdown(soon())


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_sampler_that_ends_its_thread(error: type[BaseException]) -> None:
    """The worker goes on with the next step, and each span is in a count."""
    seen: list[str] = []

    def answer(name: str, _: Attributes) -> Decision:
        seen.append(name)
        if name == "torch.step" and seen.count(name) == 5:
            raise error
        return Decision.RECORD_AND_SAMPLE

    exporter, provider = InMemorySpanExporter(), TracerProvider(Answering(answer), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with torchotel.instrument(tracer_provider=provider, detail="all") as handle:
        train(20)
        handle.flush(30)
        assert value(scrape(handle.prometheus_port).series, "torch_steps_total") == 19
    stats = handle.stats()
    assert stats["spans_recorded"] == stats["spans_exported"] + stats["spans_dropped"]
    assert stats["spans_exported"] == len(exporter.get_finished_spans()) > 15 * stats["spans_recorded"] // 20


def test_many_small_traces_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A root that waits is never ended without its children, so fewer traces wait than roots may be started."""
    assert replay_thread.MAX_WAITING_TRACES < tracer_provider.MAX_WAITING
    monkeypatch.setattr(replay_thread, "MAX_WAITING_TRACES", 4)
    kept, exporter = Kept(), Waiting()
    thread = export_to(kept, exporter, traces=11, spans=1)
    assert kept.engine.stats.read() == ExportCounts(0, 6, {}, dropped_queue=6)
    exporter.go_on.set()
    thread.shutdown(soon())
    assert kept.engine.stats.read() == ExportCounts(5, 6, {}, dropped_queue=6)
    assert exporter.n_spans == 5


def test_spans_without_a_queue_are_counted_while_steps_go_on() -> None:
    """A SimpleSpanProcessor has delivered them, though no flush was asked for."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(InMemorySpanExporter()))
    with torchotel.instrument(tracer_provider=provider, detail="all", prometheus_port=None) as handle:
        train(50)
        assert until(lambda: handle.stats()["spans_exported"], lambda spans: spans > 500) > 500


class Refilling(SpanExporter):
    """Ends a span of the program during each export, so that a flush of the SDK's processor does not return."""

    def __init__(self) -> None:
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SpanProcessor())  # such as one that adds attributes
        self.provider.add_span_processor(BatchSpanProcessor(self))
        self.n_spans, self.goes_on, self.answered = 0, True, threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.n_spans += sum(span.name != "own" for span in spans)
        if self.goes_on:
            self.provider.get_tracer("own").start_span("own").end()
        self.answered.wait(0.005)  # the time of a request, in which other threads work
        return SpanExportResult.SUCCESS


def test_a_busy_program_delays_nothing() -> None:
    """Spans are replayed and counted without the SDK's flush, which does not end; a flush of torchotel does."""
    exporter = Refilling()
    with torchotel.instrument(tracer_provider=exporter.provider, detail="all", prometheus_port=None) as handle:
        flushing = threading.Thread(target=exporter.provider.force_flush)
        exporter.provider.get_tracer("own").start_span("own").end()
        flushing.start()
        train(100)
        assert until(lambda: handle.stats()["spans_exported"], lambda spans: spans > 500) > 500
        assert handle.flush(30)
        assert flushing.is_alive()
        exporter.goes_on = False
        flushing.join()
    assert handle.stats()["spans_dropped"] == 0
    assert exporter.n_spans == handle.stats()["spans_recorded"] == handle.stats()["spans_exported"]
    exporter.provider.shutdown()


class Scoring(SpanProcessor):
    """Runs a model for each span, without gradients."""

    def __init__(self) -> None:
        self.model, self.threads = torch.nn.Linear(2, 1), set[str]()

    def score(self) -> None:
        self.threads.add(threading.current_thread().name)
        with torch.no_grad():
            self.model(torch.ones(1, 2))

    def on_start(self, span: ReadableSpan, parent_context: object = None) -> None:
        self.score()

    def on_end(self, span: ReadableSpan) -> None:
        self.score()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True


def test_a_processor_that_runs_a_model_is_not_recorded() -> None:
    """Recorded evaluations of a processor would cause further evaluations without end."""
    kept, scoring = Kept(), Scoring()
    kept.provider.add_span_processor(scoring)
    with torchotel.instrument(tracer_provider=kept.provider, detail="all", prometheus_port=None) as handle:
        train(5)
        assert handle.flush(10)
        assert handle.flush(10)
        assert handle.stats()["evaluations"] == 0
    assert scoring.threads >= {"torchotel-worker", "torchotel-replay"}


@pytest.mark.parametrize("call", ["flush", "shutdown"])
def test_a_processor_that_calls_the_handle(call: str, caplog: pytest.LogCaptureFixture) -> None:
    """The replay thread does not wait for itself, and each span is counted."""
    answers = list[object]()

    class Calling(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            if span.name == "torch.step" and not answers:
                answers.append(getattr(handle, call)(30))

        def force_flush(self, timeout_millis: int = 30_000) -> bool:
            return True

    kept = Kept()
    kept.provider.add_span_processor(Calling())
    with torchotel.instrument(tracer_provider=kept.provider, detail="all", prometheus_port=None) as handle:
        train(5)
        handle.flush(30)
    stats = handle.stats()
    assert answers == [False if call == "flush" else None]
    assert stats["internal_errors"] == 0, caplog.text
    assert stats["spans_recorded"] == stats["spans_exported"] + stats["spans_dropped"] > 0


def test_metrics_go_on_while_another_thread_flushes() -> None:
    """The thread that calls flush() waits for the exporter, not the worker."""
    exporter, provider = Waiting(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(batched(exporter))
    with torchotel.instrument(tracer_provider=provider, detail="all") as handle:
        train(5)
        flushing = threading.Thread(target=handle.flush, args=(30,))
        flushing.start()
        assert exporter.asked.wait(10)
        train(5)
        assert until(lambda: handle.stats()["steps"], lambda steps: steps >= 9) >= 9
        assert flushing.is_alive()
        exporter.go_on.set()
        flushing.join()
    provider.shutdown()


def test_the_cost_of_a_replay_counts_as_overhead() -> None:
    """As an estimate from the last trace, since a trace is replayed after its step was counted."""
    kept = Kept()
    thread = ReplayThread(kept.engine, Guard("a test"))
    assert thread.later_ns(100) == 0
    thread.export(flat(1000))
    assert thread.flush(soon())
    assert thread.later_ns(200) > thread.later_ns(100) > 100_000  # 1 µs a span
    thread.shutdown(soon())


def test_a_processor_that_blocks_the_worker_leaves_no_step_uncounted() -> None:
    """Records behind the one that is blocked are dropped at the shutdown."""
    blocked, go_on = threading.Event(), threading.Event()

    class Blocking(SpanProcessor):
        def on_start(self, span: ReadableSpan, parent_context: object = None) -> None:
            if threading.current_thread().name == "torchotel-worker":
                blocked.set()
                go_on.wait(30)

    kept = Kept()
    kept.provider.add_span_processor(Blocking())
    with torchotel.instrument(tracer_provider=kept.provider, prometheus_port=None) as handle:
        train(2)
        assert not handle.flush(0.1)
        assert blocked.wait(10)
        train(20)
        handle.shutdown(0.1)
        stats = handle.stats()
        go_on.set()
    assert stats["steps"] == 22
    assert stats["spans_recorded"] == stats["spans_dropped"] + stats["spans_exported"] > 22
