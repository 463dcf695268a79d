"""Hand spans to a provider's processors without overflowing their queues."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sized
from typing import TYPE_CHECKING

from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import TracerProvider

from torchotel.exporters.base import ExportStats
from torchotel.exporters.sdk.provider_flush import ProviderFlush

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider


UNKNOWN_ROOM = 512
"""Room that is assumed in a processor that can't be looked into; the SDK's own queue is 2,048 long."""
MAX_ROOM = 8192
"""Where nothing queues there is no limit, but spans are counted when they are flushed."""


def slice_spans(provider: TracerProvider) -> int:
    """Return how many spans may be ended before the next flush.

    Half of what the fullest queue has room for: the rest is for the spans that the program ends meanwhile, since a
    full queue of the SDK's throws its oldest spans away.
    """
    active = getattr(provider, "_active_span_processor", None)
    return max(1, min((_room(processor) for processor in _flat(active)), default=MAX_ROOM) // 2)


def _flat(processor: object) -> Iterator[object]:
    """Yield the processors behind those that only pass on."""
    inner = getattr(processor, "_span_processors", None)
    if not isinstance(inner, tuple | list):
        yield processor
        return
    for one in inner:
        yield from _flat(one)


def _room(processor: object) -> int:
    if isinstance(processor, SimpleSpanProcessor):
        return MAX_ROOM
    batch = getattr(processor, "_batch_processor", processor)
    size, queue = getattr(batch, "_max_queue_size", None), getattr(batch, "_queue", None)
    if not isinstance(size, int) or not isinstance(queue, Sized):
        return UNKNOWN_ROOM
    return min(MAX_ROOM, size - len(queue))


MAX_AGE_S = 5.0
"""Spans that ended longer ago are flushed; the SDK's batches wait as long before they leave by themselves."""


class Delivery:
    """Count ended spans into slices that fit into the provider's queues, with a flush after each.

    A span counts as exported when the flush after it succeeded, else as dropped. On one thread, but for `close`.
    """

    def __init__(self, provider: TracerProvider, stats: ExportStats) -> None:
        self._provider, self._stats = provider, stats
        self._flush = ProviderFlush(provider, stats)
        self._lock = threading.RLock()  # a signal's handler may shut down in the midst of it
        self.closed = False
        self._open = 0
        """Spans that were taken and are not counted yet; the pending ones are among them."""
        self._pending = 0
        self._traces: list[int] = []
        """Those whose roots are among the pending spans."""
        self._room = 0
        self._since_s = 0.0
        self._lost = False

    def take(self, spans: int) -> bool:
        """Take spans on, which each of them leaves by one of the next three; False where nothing is taken any more."""
        with self._lock:
            if self.closed:
                self._stats.dropped(spans)
                return False
            self._open += spans
            return True

    def ended(self, root_of: int | None = None) -> None:
        """Take note of a span that went into the queues, and whose root it is; flush them where the slice is full."""
        if not self._pending:
            self._room = slice_spans(self._provider)
            self._since_s = time.monotonic()
        self._pending += 1
        if root_of is not None:
            self._traces.append(root_of)
        if self._pending >= self._room:
            self._settle(flushed=self._flush.now())

    def left_out(self) -> None:
        """Count a span that a sampler left out."""
        with self._lock:
            if not self.closed:
                self._open -= 1
                self._stats.sampled_out(1)

    def lost(self) -> None:
        """Count a span that did not get into the queues."""
        with self._lock:
            if not self.closed:
                self._open -= 1
                self._lost = True
                self._stats.dropped(1)

    def push(self) -> None:
        """Flush what has waited for long."""
        if self._pending and time.monotonic() - self._since_s > MAX_AGE_S:
            self._settle(flushed=self._flush.now())

    def flush(self, deadline_s: float) -> bool:
        """Flush; False where that took longer than until `deadline_s`, or spans were lost since the last time."""
        self._settle(flushed=self._flush.by(deadline_s))
        lost, self._lost = self._lost, False
        return not lost

    def close(self, deadline_s: float) -> None:
        """Flush a last time; what a worker that is still at it has not brought through by then is dropped."""
        self._settle(flushed=self._flush.by(deadline_s))
        with self._lock:
            self.closed = True
            self._stats.dropped(self._open)
            self._open = 0

    def _settle(self, *, flushed: bool) -> None:
        with self._lock:
            if self.closed:
                return
            spans, self._pending = self._pending, 0
            traces, self._traces = self._traces, []
            self._open -= spans
            self._lost = self._lost or not flushed
        if flushed:
            self._stats.exported(spans, traces)
        else:
            self._stats.dropped(spans)
