"""Look into the queues of the SDK's batch span processors, which its API does not show."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from opentelemetry import trace as api
from opentelemetry.sdk.trace import (
    ConcurrentMultiSpanProcessor,
    SpanProcessor,
    SynchronousMultiSpanProcessor,
    TracerProvider,
)
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from torchotel import _semconv as names


@dataclass(eq=False, slots=True)
class SpanQueue:
    """The queue of a `BatchSpanProcessor`; used by one thread."""

    spans: deque[Any]
    """The next one to be exported is the last one."""
    max_spans: int
    """Further spans push the oldest ones out."""
    max_batch_spans: int
    exporting: Any
    """Lock that is held while the exporter runs."""
    _exported: int = 0
    """The last result of `exported`."""
    _taken: int = 0
    """Spans of torchotel that had left the queue when `_next` was the next span."""
    _next: object = None
    """When it has left the queue, the request before it has ended."""

    @property
    def room(self) -> int:
        """Spans that may be added now.

        The processor exports when the queue has a batch. The rest of the queue, at least half, is for the program.
        """
        return max(1, min(self.max_batch_spans, self.max_spans // 2)) - len(self.spans)

    @property
    def drains_itself(self) -> bool:
        """Whether the processor exports before there is no room."""
        return self.max_batch_spans <= max(1, self.max_spans // 2)

    def exported(self, ended: int) -> int:
        """Return how many spans of torchotel have been exported.

        Args:
            ended: How many were ended before.
        """
        waiting = _copied(self.spans)  # before the lock is read: a request may begin meanwhile
        taken = ended - sum(map(_is_ours, waiting))
        if not self.exporting.locked():
            self._exported, self._next = taken, None
            return taken
        if self._next is not None and not (waiting and waiting[-1] is self._next):
            self._exported, self._next = self._taken, None
        if self._next is None and waiting:
            self._taken, self._next = taken, waiting[-1]
        return self._exported


_FIELDS = attrgetter("_queue", "_max_queue_size", "_max_export_batch_size", "_export_lock", "_shutdown")
"""Of a `BatchProcessor`; a version of the SDK without one of them counts as unknown."""
_HELD = "_active_span_processor", "_span_processors"
"""Attributes of the SDK's provider and of its composite processors; what they hold may be of any class."""
_LOCK = type(threading.Lock())
_CONTAINERS = TracerProvider, SynchronousMultiSpanProcessor, ConcurrentMultiSpanProcessor


class SpanQueues(NamedTuple):
    """The queues of a provider."""

    known: Sequence[SpanQueue]
    all_known: bool
    """False: a processor is unknown or was shut down, so spans are counted by the result of a flush."""

    @property
    def are_full(self) -> bool:
        """Whether a queue has no room for spans of torchotel."""
        return any(queue.room <= 0 for queue in self.known)

    @property
    def drain_themselves(self) -> bool:
        """Whether room appears without a flush."""
        return self.all_known and all(queue.drains_itself for queue in self.known)

    def exported(self, ended: int) -> int:
        """Return how many spans of torchotel have been exported by all queues.

        Args:
            ended: How many were ended before.
        """
        return min((queue.exported(ended) for queue in self.known), default=ended)


def find_queues(provider: api.TracerProvider, before: Sequence[SpanQueue] = ()) -> SpanQueues:
    """Find the queues of a provider as it is now: a program may add processors.

    Args:
        provider: The provider.
        before: The queues that were found before, which keep their counts.
    """
    holders = _with_held(provider)
    processors = [
        one for one in holders if one is not provider and not isinstance(one, _CONTAINERS) and not _has_no_queue(one)
    ]
    found = [queue for queue in map(_queue, processors) if queue is not None]
    known = [next((one for one in before if one.spans is queue.spans), queue) for queue in found]
    return SpanQueues(known, len(known) == len(processors) and len(holders) > 1)


def _with_held(provider: api.TracerProvider) -> Sequence[object]:
    """Return a provider and all that it holds: processors, and the providers and processors that others wrap."""
    found: dict[int, object] = {}
    waiting: list[object] = [provider]
    while waiting:
        holder = waiting.pop()
        if id(holder) not in found:
            found[id(holder)] = holder
            for name, value in tuple(getattr(holder, "__dict__", {}).items()):
                held = value if isinstance(value, tuple | list) else (value,)
                waiting += [one for one in held if name in _HELD or isinstance(one, SpanProcessor | TracerProvider)]
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
