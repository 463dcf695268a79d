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

PROVIDER_ERRORS = (Exception, SystemExit, KeyboardInterrupt)
"""What a provider of the program may raise. A `SystemExit` would end the calling thread of torchotel."""
REFUSED = (
    "force_flush of %s returned False, so what waits in it counts as dropped. Do not shut the provider down before "
    "torchotel, and check its processors and readers"
)


class ProviderFlush:
    """Call `force_flush` of a provider; without this method all ended spans count as exported.

    The SDK's processors ignore the timeout while their exporter retries, and report success after it has given up. An
    unreachable endpoint appears in their log, not in the counts of torchotel.
    """

    def __init__(self, provider: TracerProvider | MeterProvider, stats: ExportStats | None = None) -> None:
        self._provider, self._stats = provider, stats or ExportStats()
        self._thread: threading.Thread | None = None
        self._warn = Warn()

    def _flush(self, timeout_s: float) -> bool:
        """Flush on this thread; the SDK's processors ignore the timeout."""
        flush = getattr(self._provider, "force_flush", None)
        if flush is None:
            return True
        try:
            with suppressed():
                flushed = flush(max(1, int(timeout_s * 1000))) is not False
        except PROVIDER_ERRORS as error:
            self._stats.error(type(error).__name__)
            provider = type(self._provider).__name__
            self._warn("%s could not be flushed; further failures are only counted", provider, error=error)
            return False
        if not flushed:
            self._warn(REFUSED, type(self._provider).__name__)
        return flushed

    def flush_by(self, deadline_s: float) -> bool | None:
        """Flush by `deadline_s` of `time.monotonic()`; return False on failure, and None on timeout."""
        if self._thread is not None:  # an earlier flush has timed out; only one may run
            self._thread.join(_until(deadline_s))
            if self._thread.is_alive():
                return None
        answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
        left_s = _until(deadline_s)
        thread = threading.Thread(target=lambda: answers.put(self._flush(left_s)), name="torchotel-flush", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending and starts no threads
            return self._flush(left_s)
        self._thread = thread
        try:
            return answers.get(timeout=_until(deadline_s))
        except queue.Empty:
            return None


def _until(deadline_s: float) -> float:
    return max(0.0, deadline_s - time.monotonic())
