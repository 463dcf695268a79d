"""Flush a provider before the queues of its span processors overflow."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sized

from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import TracerProvider

from torchotel.exporters.base import ExportStats
from torchotel.exporters.sdk.provider_flush import ProviderFlush

UNKNOWN_ROOM = 512
"""Free queue entries that are assumed for unknown processors; the SDK's queue has 2,048 entries."""
MAX_ROOM = 8192
"""Free queue entries that are used at most: spans are counted when they are flushed."""
NO_QUEUE_ROOM = 64
"""The same without any queue, where a flush takes no time."""


def slice_spans(provider: TracerProvider) -> int:
    """Return the number of spans that may be ended before the next flush.

    This is half of the free entries of the fullest queue. The other half is for spans that the program ends meanwhile:
    a full queue of the SDK drops its oldest spans.
    """
    active = getattr(provider, "_active_span_processor", None)
    rooms = (_room(one) for one in _flat(active) if not isinstance(one, SimpleSpanProcessor))
    return max(1, min(rooms, default=NO_QUEUE_ROOM) // 2)


def _flat(processor: object) -> Iterator[object]:
    """Yield the processors inside of composite processors."""
    inner = getattr(processor, "_span_processors", None)
    if not isinstance(inner, tuple | list):
        yield processor
        return
    for one in inner:
        yield from _flat(one)


def _room(processor: object) -> int:
    batch = getattr(processor, "_batch_processor", processor)
    size, queue = getattr(batch, "_max_queue_size", None), getattr(batch, "_queue", None)
    if not isinstance(size, int) or not isinstance(queue, Sized):
        return UNKNOWN_ROOM
    return min(MAX_ROOM, size - len(queue))


MAX_AGE_S = 5.0
"""Age of an ended span at which it is flushed; the SDK exports batches at the same age."""


class Delivery:
    """Count ended spans, and flush the provider before its queues overflow.

    A span counts as exported if the next flush succeeds, and as dropped if the flush fails. After a timeout, the span
    waits for another flush. All methods but `abandon` are called on one thread.
    """

    def __init__(self, provider: TracerProvider, stats: ExportStats) -> None:
        self._provider, self._stats = provider, stats
        self._provider_flush = ProviderFlush(provider, stats)
        self._lock = threading.RLock()  # reentrant: a signal handler may shut down while this thread holds it
        self.closed = False
        self._open = 0
        """Spans that are not counted yet, including the pending ones."""
        self._pending = 0
        self._traces: list[int] = []
        """Ids of the traces whose roots are pending."""
        self._room = 0
        self._since_s = 0.0
        self._has_dropped = False

    def accept(self, spans: int) -> bool:
        """Accept spans, each of which is later ended, sampled out or dropped; return False after `close`."""
        with self._lock:
            if self.closed:
                self._stats.dropped(spans)
                return False
            self._open += spans
            return True

    def ended(self, root_of: int | None = None) -> None:
        """Count a span that was added to the queues, and flush if necessary; `root_of`: the trace whose root it is."""
        if not self._pending:
            self._room = slice_spans(self._provider)
            self._since_s = time.monotonic()
        self._pending += 1
        if root_of is not None:
            self._traces.append(root_of)
        if self._pending >= self._room:
            self._count_flushed(flushed=self._provider_flush.flush())

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
        """Flush if the oldest pending span is too old."""
        if self._pending and time.monotonic() - self._since_s > MAX_AGE_S:
            self._count_flushed(flushed=self._provider_flush.flush())

    def flush(self, deadline_s: float) -> bool:
        """Flush. Return False on timeout or if spans were dropped since the last flush."""
        flushed = self._flush_by(deadline_s)
        dropped, self._has_dropped = self._has_dropped, False
        return flushed and not dropped

    def close(self, deadline_s: float) -> None:
        """Flush a last time by the deadline; spans that are not flushed or not ended by then are dropped."""
        self._flush_by(deadline_s)
        self.abandon()

    def abandon(self) -> None:
        """Count the spans that are not flushed as dropped."""
        with self._lock:
            self.closed = True
            self._stats.dropped(self._open)
            self._open = 0

    def _flush_by(self, deadline_s: float) -> bool:
        flushed = self._provider_flush.flush_by(deadline_s)
        if flushed is not None:
            self._count_flushed(flushed=flushed)
        return bool(flushed)

    def _count_flushed(self, *, flushed: bool) -> None:
        with self._lock:
            if self.closed:
                return
            spans, self._pending = self._pending, 0
            traces, self._traces = self._traces, []
            self._open -= spans
            self._has_dropped = self._has_dropped or not flushed
        if flushed:
            self._stats.exported(spans, traces)
        else:
            self._stats.dropped(spans)
