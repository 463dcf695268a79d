"""The queues of a provider's processors, read from the SDK that is installed."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import (
    ConcurrentMultiSpanProcessor,
    ReadableSpan,
    SpanProcessor,
    SynchronousMultiSpanProcessor,
    TracerProvider,
)
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NoOpTracerProvider

from torchotel import _semconv as names
from torchotel.exporters.sdk.delivery import find_queues


class Flushed(SpanProcessor):
    """A processor with a flush: it may have a queue of its own."""

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True


class Held(SpanExporter):
    """Each request ends when the test allows it."""

    def __init__(self) -> None:
        self.asked, self.permits = threading.Event(), threading.Semaphore(0)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked.set()
        self.permits.acquire(timeout=30)
        return SpanExportResult.SUCCESS

    def next_request(self) -> None:
        """Let a request end, and wait until the next one has begun."""
        self.asked.clear()
        self.permits.release()
        assert self.asked.wait(10)


def batch(queue: int, exporter: SpanExporter | None = None, batch: int = 10) -> BatchSpanProcessor:
    """Return a processor of the SDK that exports only full batches."""
    exporter = InMemorySpanExporter() if exporter is None else exporter
    return BatchSpanProcessor(exporter, queue, schedule_delay_millis=3_600_000, max_export_batch_size=batch)


def provider_of(*processors: SpanProcessor) -> TracerProvider:
    provider = TracerProvider(shutdown_on_exit=False)
    for processor in processors:
        provider.add_span_processor(processor)
    return provider


def end_spans(provider: TracerProvider, scope: str, n_spans: int) -> None:
    for _ in range(n_spans):
        provider.get_tracer(scope).start_span("span").end()


@pytest.mark.parametrize("composite", [SynchronousMultiSpanProcessor, ConcurrentMultiSpanProcessor])
def test_the_smallest_queue_decides(
    composite: type[SynchronousMultiSpanProcessor] | type[ConcurrentMultiSpanProcessor],
) -> None:
    """Queues are found in nested processors; a batch, and at most half of a queue, is for spans of torchotel."""
    inner, outer = composite(), composite()
    inner.add_span_processor(batch(40, batch=30))
    outer.add_span_processor(inner)
    outer.add_span_processor(SimpleSpanProcessor(InMemorySpanExporter()))
    provider = provider_of(batch(100, batch=30), outer)
    queues = find_queues(provider)
    assert sorted((queue.max_spans, queue.room) for queue in queues.known) == [(40, 20), (100, 30)]
    assert (queues.all_known, queues.drain_themselves) == (True, False)
    end_spans(provider, "own", 19)
    assert not queues.are_full
    end_spans(provider, "own", 1)
    assert queues.are_full
    provider.shutdown()


def test_a_span_is_exported_when_its_request_has_ended() -> None:
    """Spans of the program in the queue do not matter, even if one request follows another."""
    exporter = Held()
    provider = provider_of(batch(100, exporter))
    (queue,) = find_queues(provider).known
    end_spans(provider, "own", 3)
    end_spans(provider, names.SCOPE, 2)
    assert queue.exported(2) == 0
    end_spans(provider, names.SCOPE, 5)
    assert exporter.asked.wait(10)
    assert queue.exported(7) == 0
    end_spans(provider, names.SCOPE, 4)
    end_spans(provider, "own", 20)
    assert queue.exported(11) == 0
    exporter.next_request()
    assert queue.exported(11) == 7
    exporter.next_request()
    assert queue.exported(11) == 11
    exporter.permits.release(5)
    provider.shutdown()


def test_a_batch_larger_than_half_of_the_queue() -> None:
    """The processor would not export before the queue is half full, so it has to be flushed."""
    provider = provider_of(batch(16, batch=10))
    (queue,) = find_queues(provider).known
    assert (queue.room, queue.drains_itself) == (8, False)
    provider.shutdown()


@pytest.mark.parametrize("processors", [[], [SpanProcessor()], [SimpleSpanProcessor(InMemorySpanExporter())]])
def test_processors_without_a_queue(processors: list[SpanProcessor]) -> None:
    """A processor that only adds attributes, and one that exports each span at once, need no flush."""
    queues = find_queues(provider_of(*processors))
    assert (queues.all_known, queues.are_full, queues.exported(5)) == (True, False, 5)


class Wrapper(SpanProcessor):
    """Passes spans on to other processors, which it does not flush."""

    def __init__(self, *inner: SpanProcessor) -> None:
        self.inner, self.first = inner, inner[0]
        self.outer = self

    def on_end(self, span: ReadableSpan) -> None:
        for processor in self.inner:
            processor.on_end(span)

    def shutdown(self) -> None:
        for processor in self.inner:
            processor.shutdown()


def test_a_processor_that_wraps_others() -> None:
    """Their queues are found, each once, though the wrapper has no flush."""
    provider = provider_of(Wrapper(Wrapper(batch(40)), batch(100)))
    queues = find_queues(provider)
    assert sorted(queue.max_spans for queue in queues.known) == [40, 100]
    assert queues.all_known
    provider.shutdown()


@pytest.mark.parametrize("processors", [[Flushed()], [Flushed(), SimpleSpanProcessor(InMemorySpanExporter())]])
def test_a_processor_of_the_program(processors: list[SpanProcessor]) -> None:
    """One with a flush may have a queue of any length, so the provider has to be flushed."""
    queues = find_queues(provider_of(*processors))
    assert (queues.all_known, queues.drain_themselves) == (False, False)


def test_a_processor_of_any_class() -> None:
    """The SDK calls the methods of a processor without asking for its class."""

    class Other:
        """Has the methods of a processor that the SDK calls."""

        def __getattr__(self, name: str) -> object:
            return lambda *_, **__: None

    provider = TracerProvider(shutdown_on_exit=False)
    other: Any = Other()
    provider.add_span_processor(other)
    assert not find_queues(provider).all_known


def test_a_provider_that_wraps_another_one() -> None:
    """The queues of the inner provider are found, though the wrapper has no flush."""

    class WrapperProvider(NoOpTracerProvider):
        def __init__(self, inner: TracerProvider) -> None:
            self.inner = inner

    provider = provider_of(batch(40))
    queues = find_queues(WrapperProvider(provider))
    assert ([queue.max_spans for queue in queues.known], queues.all_known) == ([40], True)
    provider.shutdown()


@pytest.mark.parametrize("field", ["_queue", "_max_queue_size", "_max_export_batch_size", "_export_lock", "_shutdown"])
def test_another_version_of_the_sdk(field: str) -> None:
    """Without one of its private fields, a processor counts as unknown."""
    processor = batch(100)
    provider = provider_of(processor)
    assert find_queues(provider).all_known
    vars(processor._batch_processor)["other"] = vars(processor._batch_processor).pop(field)
    assert not find_queues(provider).all_known
    vars(processor._batch_processor)[field] = vars(processor._batch_processor)["other"]
    provider.shutdown()


def test_a_processor_that_was_shut_down() -> None:
    """It discards spans, so it is not taken for an empty queue."""
    provider = provider_of(batch(100))
    provider.shutdown()
    assert not find_queues(provider).all_known


def test_a_provider_of_the_api() -> None:
    """A provider without the SDK's processors has a queue of unknown length."""
    assert not find_queues(NoOpTracerProvider()).all_known
