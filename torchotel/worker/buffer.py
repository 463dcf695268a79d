"""The waist's buffer: training threads put finished steps in, the worker takes them out."""

import contextlib
import queue
import threading
from collections import deque

from torchotel._limits import MAX_BUFFER_SPANS
from torchotel._records import Recordable


class Bell:
    """Wake a thread that waits; unlike an event's, its ring may be interrupted by a signal's handler that rings too."""

    def __init__(self) -> None:
        self._rings: queue.SimpleQueue[None] = queue.SimpleQueue()

    def ring(self) -> None:
        """End the present or the next wait."""
        if self._rings.empty():
            self._rings.put(None)

    def wait(self, timeout_s: float) -> None:
        """Wait for a ring, or until the time is up."""
        with contextlib.suppress(queue.Empty):
            self._rings.get(timeout=timeout_s)


class Buffer:
    """Hold finished steps until the worker comes; when it is full the oldest go, and are counted.

    Args:
        limit: Most spans that the records held may make.
    """

    def __init__(self, limit: int = MAX_BUFFER_SPANS) -> None:
        self._limit = limit
        self._handed: deque[tuple[Recordable, int]] = deque()
        self._spans = 0
        self._dropped = 0
        self._lock = threading.RLock()  # a signal's handler may flush or count in the midst of it
        self.bell = Bell()
        """Rings when there is enough for the worker to come early."""

    def put(self, handed: Recordable) -> None:
        """Add what is handed over; never waits for the worker."""
        spans = handed.span_estimate()
        with self._lock:
            self._handed.append((handed, spans))
            self._spans += spans
            while self._spans > self._limit and len(self._handed) > 1:
                _, lost = self._handed.popleft()
                self._spans -= lost
                self._dropped += lost
            early = self._spans > self._limit // 8
        if early:
            self.bell.ring()

    def take(self) -> Recordable | None:
        """Remove the oldest."""
        with self._lock:
            if not self._handed:
                return None
            handed, spans = self._handed.popleft()
            self._spans -= spans
            return handed

    def take_dropped(self) -> int:
        """Return how many spans went since the last call because the buffer was full."""
        with self._lock:
            dropped, self._dropped = self._dropped, 0
            return dropped
