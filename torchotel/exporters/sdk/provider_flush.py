"""Flush a provider of the program with a deadline."""

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


class ProviderFlush:
    """Call `force_flush` of a provider; without this method all ended spans count as exported.

    The SDK's processors ignore the timeout while their exporter retries, and report success after it has given up. An
    unreachable endpoint appears in their log, not in the counts of torchotel.
    """

    def __init__(self, provider: TracerProvider | MeterProvider, stats: ExportStats | None = None) -> None:
        self._provider, self._stats = provider, stats or ExportStats()
        self._answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._running = False
        """Whether a flush was started whose answer is not known yet."""
        self._warn = Warn()

    def start(self, timeout_s: float) -> None:
        """Flush on another thread; only one flush may run."""
        self._running = True

        def flush() -> None:
            self._answers.put(self._flush(timeout_s))

        try:
            threading.Thread(target=flush, name="torchotel-flush", daemon=True).start()
        except RuntimeError:  # the interpreter is ending and starts no threads
            flush()

    def wait(self, deadline_s: float) -> bool | None:
        """Return whether the flush that runs succeeds; None if it runs beyond `deadline_s` of `time.monotonic()`."""
        try:
            answer = self._answers.get(timeout=_until(deadline_s))
        except queue.Empty:
            return None
        self._running = False
        return answer

    def flush_by(self, deadline_s: float) -> bool:
        """Flush; return False on failure or if this takes beyond `deadline_s` of `time.monotonic()`."""
        if self._running and self.wait(deadline_s) is None:
            return False
        self.start(_until(deadline_s))
        return bool(self.wait(deadline_s))

    def _flush(self, timeout_s: float) -> bool:
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


def _until(deadline_s: float) -> float:
    return max(0.0, deadline_s - time.monotonic())
