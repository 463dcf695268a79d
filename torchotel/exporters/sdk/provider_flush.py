"""Flush a provider of the program with a deadline."""

from __future__ import annotations

import inspect
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from torchotel._utils.faults import Warn
from torchotel.exporters.base import ExportStats
from torchotel.tracing.context import suppressed

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

PROVIDER_ERRORS = BaseException
"""What a provider of the program may raise. For example, a `SystemExit` would end the calling thread of torchotel."""
RAISED = (
    "force_flush of %s raised, so what waits in it counts as dropped. Check that all its processors and readers have "
    "this method; further failures are only counted"
)
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

    def flush_by(self, deadline_s: float) -> bool | None:
        """Flush by `deadline_s` of `time.monotonic()`; return False on failure, and None on timeout."""
        if self._thread is not None:  # an earlier flush has timed out; only one may run
            self._thread.join(_until(deadline_s))
            if self._thread.is_alive():
                return None
        answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._start(deadline_s, answers.put)
        try:
            return answers.get(timeout=_until(deadline_s))
        except queue.Empty:
            return None

    def start(self, deadline_s: float) -> None:
        """Start a flush, unless one runs; its result is ignored."""
        if hasattr(self._provider, "force_flush") and (self._thread is None or not self._thread.is_alive()):
            self._start(deadline_s, None)

    def _start(self, deadline_s: float, answer: Callable[[bool], None] | None) -> None:
        def flush() -> None:
            flushed = self._flush(_until(deadline_s))
            if answer is not None:
                answer(bool(flushed))
                if flushed is False:
                    self._warn(REFUSED, type(self._provider).__name__)

        thread = threading.Thread(target=flush, name="torchotel-flush", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending and starts no threads
            flush()
        else:
            self._thread = thread

    def _flush(self, timeout_s: float) -> bool | None:
        """Flush on this thread; the SDK's batch processors ignore the timeout. Return None if the provider raised."""
        flush = getattr(self._provider, "force_flush", None)
        if flush is None:
            return True
        timeout_ms = max(1, int(timeout_s * 1000))
        try:
            with suppressed():
                return (flush(timeout_ms) if _accepts(flush, timeout_ms) else flush()) is not False
        except PROVIDER_ERRORS as error:
            self._stats.error(type(error).__name__)
            self._warn(RAISED, type(self._provider).__name__, error=error)
            return None


def _accepts(function: Callable[..., object], argument: object) -> bool:
    """Return whether a function has a positional parameter: the API does not define that of `force_flush`."""
    try:
        inspect.signature(function).bind(argument)
    except TypeError:
        return False
    except ValueError:  # a function of C may have no signature
        return True
    return True


def _until(deadline_s: float) -> float:
    return max(0.0, deadline_s - time.monotonic())
