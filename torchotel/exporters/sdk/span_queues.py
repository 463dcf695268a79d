"""Look into the queues of the SDK's batch span processors, which its API does not show."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from opentelemetry.sdk.trace import ConcurrentMultiSpanProcessor, SpanProcessor, SynchronousMultiSpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import TracerProvider

from torchotel import _semconv as names


class SpanQueue(NamedTuple):
    """The queue of a `BatchSpanProcessor`."""

    spans: deque[Any]
    max_spans: int
    """Further spans push the oldest ones out."""
    max_batch_spans: int
    exporting: Any
    """Lock that is held while the exporter runs."""

    @property
    def room(self) -> int:
        """Spans of torchotel that may be added now. The other half of the queue is for spans of the program."""
        return max(1, self.max_spans // 2) - len(self.spans)

    @property
    def drains_itself(self) -> bool:
        """Whether the processor exports before its queue is half full."""
        return self.max_batch_spans <= max(1, self.max_spans // 2)

    def waiting_spans(self) -> int:
        """Return how many spans of torchotel are in the queue, or may be in a request that is being sent."""
        in_flight = self.max_batch_spans if self.exporting.locked() else 0
        return in_flight + sum(_is_ours(span) for span in _copied(self.spans))


UNKNOWN_ROOM = 256
"""Spans that may be added between two flushes if a processor is unknown: half of the free entries that are assumed."""
NO_QUEUE_ROOM = 64
"""Spans between two counts without any queue."""
_FIELDS = attrgetter("_queue", "_max_queue_size", "_max_export_batch_size", "_export_lock", "_shutdown")
"""Of a `BatchProcessor`; a version of the SDK without one of them counts as unknown."""
_LOCK = type(threading.Lock())
_COMPOSITES = SynchronousMultiSpanProcessor, ConcurrentMultiSpanProcessor


class SpanQueues(NamedTuple):
    """The queues of a provider."""

    known: Sequence[SpanQueue]
    all_known: bool
    """False: a processor is unknown or was shut down, so spans are counted by the result of a flush."""

    @property
    def room(self) -> int:
        """Spans that may be added now."""
        rooms = [queue.room for queue in self.known]
        return min([*rooms, UNKNOWN_ROOM]) if not self.all_known else min(rooms, default=NO_QUEUE_ROOM)

    @property
    def drain_themselves(self) -> bool:
        """Whether no flush is needed before they are half full."""
        return self.all_known and all(queue.drains_itself for queue in self.known)

    def waiting_spans(self) -> int:
        """Return how many spans of torchotel at most are in a queue, or may be in a request that is being sent."""
        return max((queue.waiting_spans() for queue in self.known), default=0)


def find_queues(provider: TracerProvider) -> SpanQueues:
    """Find the queues of a provider as it is now: a program may add processors."""
    found = [
        _queue(processor)
        for processor in _all_processors(getattr(provider, "_active_span_processor", None))
        if not isinstance(processor, _COMPOSITES) and not _has_no_queue(processor)
    ]
    known = [queue for queue in found if queue is not None]
    return SpanQueues(known, len(known) == len(found))


def _all_processors(outermost: object) -> Sequence[object]:
    """Return a processor and those that it holds: composite processors, and processors that wrap another one."""
    found: dict[int, object] = {}
    waiting = [outermost]
    while waiting:
        processor = waiting.pop()
        if id(processor) not in found:
            found[id(processor)] = processor
            for value in tuple(getattr(processor, "__dict__", {}).values()):
                held = value if isinstance(value, tuple | list) else (value,)
                waiting += [one for one in held if isinstance(one, SpanProcessor)]
    return tuple(found.values())


def _has_no_queue(processor: object) -> bool:
    """Return whether a processor is the SDK's simple one, or has no flush of its own.

    Examples are one that adds attributes, and one that passes some spans to a processor that it holds.
    """
    return isinstance(processor, SimpleSpanProcessor) or (
        isinstance(processor, SpanProcessor) and type(processor).force_flush is SpanProcessor.force_flush
    )


def _queue(processor: object) -> SpanQueue | None:
    batch = getattr(processor, "_batch_processor", processor)
    try:
        *fields, is_shut_down = _FIELDS(batch)
    except AttributeError:
        return None
    queue = SpanQueue(*fields)
    is_known = isinstance(queue.spans, deque) and isinstance(queue.exporting, _LOCK) and not is_shut_down
    return queue if is_known else None


def _copied(spans: deque[Any]) -> Sequence[Any]:
    while True:
        try:
            return tuple(spans)
        except RuntimeError:  # another thread has changed it meanwhile
            continue


def _is_ours(span: object) -> bool:
    return getattr(getattr(span, "instrumentation_scope", None), "name", None) == names.SCOPE
