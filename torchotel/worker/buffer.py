"""The buffer of finished records: training threads append them, the worker removes them."""

import contextlib
import queue
import threading
from collections import deque

from torchotel._limits import MAX_BUFFER_SPANS
from torchotel._records import Recordable


class Bell:
    """Wake a waiting thread. Unlike `threading.Event.set`, `ring` may be interrupted by a signal handler that rings."""

    def __init__(self) -> None:
        self._rings: queue.SimpleQueue[None] = queue.SimpleQueue()

    def ring(self) -> None:
        """End the present or the next wait."""
        if self._rings.empty():
            self._rings.put(None)

    def wait(self, timeout_s: float) -> None:
        """Wait for a ring, at most `timeout_s` seconds."""
        with contextlib.suppress(queue.Empty):
            self._rings.get(timeout=timeout_s)


class Buffer:
    """Hold finished records for the worker; a full buffer drops the oldest records and counts their spans.

    Args:
        limit: The most spans that the buffered records may have.
    """

    def __init__(self, limit: int = MAX_BUFFER_SPANS) -> None:
        self._limit = limit
        self._pending: deque[tuple[Recordable, int]] = deque()
        self._spans = 0
        self._dropped = 0
        self._lock = threading.RLock()  # reentrant: a signal handler may call flush() or stats() during an append
        self.bell = Bell()
        """Rings when an eighth of the buffer is full, so that the worker does not wait for its interval."""

    def append(self, pending: Recordable) -> None:
        """Add a record; never wait for the worker."""
        spans = pending.span_estimate()
        with self._lock:
            self._pending.append((pending, spans))
            self._spans += spans
            while self._spans > self._limit and len(self._pending) > 1:
                _, dropped = self._pending.popleft()
                self._spans -= dropped
                self._dropped += dropped
            wake_worker = self._spans > self._limit // 8
        if wake_worker:
            self.bell.ring()

    def pop_oldest(self) -> Recordable | None:
        """Remove and return the oldest record; None if the buffer is empty."""
        with self._lock:
            if not self._pending:
                return None
            pending, spans = self._pending.popleft()
            self._spans -= spans
            return pending

    def count_dropped(self, spans: int) -> None:
        """Count spans of records that were dropped before they could be added."""
        with self._lock:
            self._dropped += spans

    def pop_dropped(self) -> int:
        """Return how many spans the full buffer has dropped since the last call."""
        with self._lock:
            dropped, self._dropped = self._dropped, 0
            return dropped
