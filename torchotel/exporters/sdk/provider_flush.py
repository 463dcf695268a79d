"""Flush a provider of the user's, and wait for it no longer than asked."""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING

from torchotel._utils.faults import Warn
from torchotel.exporters.base import ExportStats
from torchotel.tracing.context import suppressed

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

SLICE_TIMEOUT_S = 30.0
"""What a flush between slices may take by its own account; the SDK's default."""


class ProviderFlush:
    """Call `force_flush` where the provider has one; without one all that was ended counts as sent.

    The SDK's processors flush for as long as their exporter tries, whatever time they are given, and say that they
    succeeded where it gave up: a dead endpoint is found in their log, not in our counts.
    """

    def __init__(self, provider: TracerProvider | MeterProvider, stats: ExportStats | None = None) -> None:
        self._provider, self._stats = provider, stats or ExportStats()
        self._thread: threading.Thread | None = None
        self._warn = Warn()

    def now(self, timeout_s: float = SLICE_TIMEOUT_S) -> bool:
        """Flush on this thread, for as long as it takes."""
        flush = getattr(self._provider, "force_flush", None)
        if flush is None:
            return True
        try:
            with suppressed():
                return flush(max(1, int(timeout_s * 1000))) is not False
        except Exception as error:  # noqa: BLE001  # a provider of the program may raise anything
            self._stats.error(type(error).__name__)
            provider = type(self._provider).__name__
            self._warn("%s could not be flushed; further failures are only counted", provider, error=error)
            return False

    def by(self, deadline_s: float) -> bool:
        """Flush, and return False where that lasts beyond `deadline_s` of `time.monotonic()`."""
        if self._thread is not None:  # one that lasted too long: two would stand in each other's way
            self._thread.join(_until(deadline_s))
            if self._thread.is_alive():
                return False
        answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
        left_s = _until(deadline_s)
        thread = threading.Thread(target=lambda: answers.put(self.now(left_s)), name="torchotel-flush", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending, and starts no more threads
            return self.now(left_s)
        self._thread = thread
        try:
            return answers.get(timeout=_until(deadline_s))
        except queue.Empty:
            return False


def _until(deadline_s: float) -> float:
    return max(0.0, deadline_s - time.monotonic())
