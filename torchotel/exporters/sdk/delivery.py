"""Count the spans that a provider has exported, and wait while its queues are full.

The SDK's API does not show the queues of its batch span processors; `find_queues` looks into them.
"""

from __future__ import annotations

import threading
import time
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
from torchotel.exporters.base import ExportStats
from torchotel.exporters.sdk.provider_flush import ProviderFlush

MIN_POLL_S, MAX_POLL_S = 0.0005, 0.01
"""Time between two looks at a full queue, which grows: a short queue is empty again after one batch."""
DRAIN_S = 0.2
"""Time after which a full queue is flushed."""
SPANS_PER_COUNT = 256
"""Spans between two counts; of an unknown processor, those that are at risk between two flushes."""
UNKNOWN_FLUSH_S = 2.0
"""Time after which the replay goes on during the flush of an unknown processor."""
MAX_AGE_S = 5.0
"""Age at which spans of an unknown processor are flushed; the SDK exports batches at the same age."""


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


class Delivery:
    """Count ended spans, and wait while the provider's queues are full.

    A span counts as exported when the queues show it, or an unknown processor was flushed, and as dropped if a flush
    fails. No method waits for the end of a flush if the queues show that the spans of torchotel have been exported: the
    flush of a `BatchSpanProcessor` does not return while the program ends further spans. All methods but `abandon` are
    called on one thread.
    """

    def __init__(self, provider: api.TracerProvider, stats: ExportStats) -> None:
        self._provider, self._stats = provider, stats
        self._provider_flush = ProviderFlush(provider, stats)
        self._lock = threading.RLock()  # reentrant: a signal handler may shut down while this thread holds it
        self._closing = threading.Event()
        self._open = 0
        """Spans that are not counted yet, including those that have not ended."""
        self._ended = self._counted = 0
        """All spans that were added to the queues, and those of them that are counted."""
        self._roots: deque[tuple[int, int]] = deque()
        """Numbers of the ended roots that are not counted, with the ids of their traces."""
        self._queues = find_queues(provider)
        self._left = SPANS_PER_COUNT
        """Spans that may be ended before the next count."""
        self._since_s = 0.0
        """When the oldest span that is not counted was ended."""
        self._has_dropped = False

    @property
    def closed(self) -> bool:
        """Whether no further span is counted."""
        return self._closing.is_set()

    def accept(self, spans: int) -> bool:
        """Accept spans, each of which is later ended, sampled out or dropped; return False after `close`."""
        with self._lock:
            if self.closed:
                self._stats.dropped(spans)
                return False
            self._open += spans
            return True

    def ended(self, root_of: int | None = None) -> None:
        """Count a span that was added to the queues, and wait if they are full.

        Args:
            root_of: The id of the trace whose root it is.
        """
        if self._ended == self._counted:
            self._since_s = time.monotonic()
        self._ended += 1
        if root_of is not None:
            self._roots.append((self._ended, root_of))
        self._left -= 1
        if self._left <= 0:
            self._left = SPANS_PER_COUNT
            self._count_or_flush()
        if self._queues.are_full:
            self._make_room()

    def sampled_out(self) -> None:
        """Count a span that the sampler did not sample."""
        with self._lock:
            if not self.closed:
                self._open -= 1
                self._stats.sampled_out(1)

    def dropped(self) -> None:
        """Count a span that was not added to the queues."""
        with self._lock:
            if not self.closed:
                self._open -= 1
                self._has_dropped = True
                self._stats.dropped(1)

    def push(self) -> None:
        """Count the spans that have left the queues; flush if there is an unknown processor and spans are too old."""
        if self._find_queues().all_known:
            self._count_exported()
        elif self._ended > self._counted and time.monotonic() - self._since_s > MAX_AGE_S:
            self._since_s = time.monotonic()
            self._flush_by(self._since_s + UNKNOWN_FLUSH_S)

    def flush(self, deadline_s: float) -> bool:
        """Flush. Return False on timeout or if spans were dropped since the last flush."""
        flushed = self._flush_by(deadline_s)
        dropped, self._has_dropped = self._has_dropped, False
        return flushed and not dropped

    def close(self, deadline_s: float) -> None:
        """Flush a last time by the deadline; spans that are not exported or not ended by then are dropped."""
        self._flush_by(deadline_s)
        self.abandon()

    def abandon(self) -> None:
        """Count the spans that are not exported as dropped."""
        with self._lock:
            self._closing.set()
            self._stats.dropped(self._open)
            self._open = 0

    def _count_or_flush(self) -> None:
        if self._find_queues().all_known:
            self._count_exported()
        else:
            self._flush_by(time.monotonic() + UNKNOWN_FLUSH_S)

    def _make_room(self) -> None:
        """Wait until there is room in the queues, and flush if it does not appear."""
        flush_at_s = time.monotonic() + (DRAIN_S if self._queues.drain_themselves else 0.0)
        poll_s = MIN_POLL_S
        while self._find_queues().are_full and not self._closing.wait(poll_s):
            poll_s = min(2 * poll_s, MAX_POLL_S)
            if time.monotonic() >= flush_at_s:
                self._flush_by(time.monotonic() + DRAIN_S)
                flush_at_s = time.monotonic() + DRAIN_S
        if self._queues.all_known:
            self._count_exported()

    def _find_queues(self) -> SpanQueues:
        self._queues = find_queues(self._provider, self._queues.known)
        return self._queues

    def _flush_by(self, deadline_s: float) -> bool:
        """Flush until all ended spans are counted; return False on failure or timeout."""
        poll_s = MIN_POLL_S
        while self._find_queues().all_known:
            self._provider_flush.start(deadline_s)  # it may go on with spans of the program
            self._count_exported()
            if self._counted == self._ended or time.monotonic() >= deadline_s or self._closing.wait(poll_s):
                return self._counted == self._ended
            poll_s = min(2 * poll_s, MAX_POLL_S)
        flushed = self._provider_flush.flush_by(deadline_s)
        if flushed is not None:
            self._count_flushed(flushed=flushed)
        return bool(flushed)

    def _count_exported(self) -> None:
        self._count(self._queues.exported(self._ended) - self._counted, exported=True)

    def _count_flushed(self, *, flushed: bool) -> None:
        self._count(self._ended - self._counted, exported=flushed)

    def _count(self, spans: int, *, exported: bool) -> None:
        """Count the oldest spans of the queues."""
        with self._lock:
            if self.closed or spans <= 0:
                return
            self._counted += spans
            self._open -= spans
            self._has_dropped = self._has_dropped or not exported
            traces = []
            while self._roots and self._roots[0][0] <= self._counted:
                traces.append(self._roots.popleft()[1])
        if exported:
            self._stats.exported(spans, traces)
        else:
            self._stats.dropped(spans)
