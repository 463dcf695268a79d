"""The backend of a process that may be a launcher: another one, which starts with the first record."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from torchotel._records import Recordable
from torchotel._types import ConfigError
from torchotel._utils.faults import Guard
from torchotel.tracing.span import SpanContextSource
from torchotel.worker.backend import Backend, RunEnd
from torchotel.worker.stats import CaptureStats, Stats, WorkerState, no_stats
from torchotel.worker.status_page import PhaseWriter, new_page

NOT_STARTED = "Nothing is exported or recorded by this process: %s"

_logger = logging.getLogger("torchotel")


class DeferredBackend(Backend):
    """Start a backend with the first record, on the thread that hands it over.

    A launcher never gets a record. So it opens no port and no run folder, and has no companion process.

    Args:
        make: Makes the backend, with a stack for the callbacks that release what is open, if a later part fails. A
            companion continues the phases of the writer.
        id_source: Fixes the ids of spans that the program reads while they run.
        capture_stats: Returns the counts of capture.
    """

    def __init__(
        self,
        make: Callable[[ExitStack, PhaseWriter], Backend],
        id_source: SpanContextSource,
        capture_stats: Callable[[], CaptureStats],
    ) -> None:
        self._make, self.id_source, self._capture_stats = make, id_source, capture_stats
        self.phase_log = self._phases = PhaseWriter(new_page(), threading.main_thread().ident or 0)
        self._guard = Guard("the start of the worker", limit=1000)
        self._lock = threading.RLock()  # reentrant: a signal handler may shut down while the backend starts
        self._backend: Backend | None = None
        self._has_tried = self._ended = False
        self._dropped = 0
        """Spans of the records that no backend got."""

    def fix_identity(self) -> None:
        """Start the backend with the first record of this process, and pass the call on."""
        backend = self._started()
        if backend is not None:
            backend.fix_identity()

    def _started(self) -> Backend | None:
        """Return the backend, after its start; None if it cannot be started, or starts below on this thread's stack."""
        if self._backend is None:
            with self._lock:
                if not self._has_tried and not self._ended:
                    self._has_tried = True
                    self._guard.guarded(self._start)()
        return self._backend

    def _start(self) -> None:
        try:
            with ExitStack() as undo:
                backend = self._make(undo, self._phases)
                backend.start(undo)
                undo.pop_all()
        except (ConfigError, OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
            _logger.warning(NOT_STARTED, error)
            return
        if self._ended:  # a signal handler has shut down meanwhile
            backend.discard()
        else:
            self._backend = backend

    def append(self, record: Recordable) -> None:
        """Pass a record on; without a backend, drop it and count its spans."""
        backend = self._started()  # logged values may come before the first step
        if backend is None:
            self._dropped += record.span_estimate()
        else:
            backend.append(record)

    def start(self, undo: ExitStack) -> None:
        """Do nothing: the backend starts with the first record."""

    @property
    def companion_pid(self) -> int | None:
        """The id of the companion process; None without one."""
        return None if self._backend is None else self._backend.companion_pid

    @property
    def prometheus_port(self) -> int | None:
        """The port that the scrape endpoint is bound to; None before the first record."""
        return None if self._backend is None else self._backend.prometheus_port

    @property
    def run_folder(self) -> Path | None:
        """The folder that the run is recorded in; None before the first record."""
        return None if self._backend is None else self._backend.run_folder

    def flush(self, timeout_s: float) -> bool:
        """Export all records so far; return False on timeout, or if spans were dropped since the last flush."""
        with self._lock:  # another thread may start the backend now
            backend, dropped = self._backend, self._dropped
        return not dropped if backend is None else backend.flush(timeout_s)

    def stop(self, deadline_s: float, end: RunEnd) -> None:
        """Export the remaining records, end threads and processes, close ports and files."""
        with self._lock:
            self._ended = True
        if self._backend is not None:
            self._backend.stop(deadline_s, end)

    def discard(self) -> None:
        """End before the first record, and remove what was created."""
        with self._lock:
            self._ended = True
        if self._backend is not None:
            self._backend.discard()

    def disable_after_fork(self) -> None:
        """Export nothing in a forked child."""
        self._lock, self._ended = threading.RLock(), True  # another thread of the parent may have held the lock
        if self._backend is not None:
            self._backend.disable_after_fork()

    def discard_run_file(self, *, only_empty: bool = False) -> None:
        """Remove the run file, or only if it has no record."""
        if self._backend is not None:
            self._backend.discard_run_file(only_empty=only_empty)

    def stats(self) -> Stats:
        """Return the present counts."""
        if self._backend is not None:
            counts = self._backend.stats()
            counts["internal_errors"] += self._guard.faults
            return counts
        capture, counts = self._capture_stats(), no_stats()
        counts["calls_dropped"], counts["stamps_dropped"] = capture.calls_dropped, capture.stamps_dropped
        counts["internal_errors"] = capture.internal_errors + self._guard.faults
        counts["spans_recorded"] = counts["spans_dropped"] = self._dropped
        return counts

    def worker_state(self) -> WorkerState | None:
        """Return the state of the worker; None before the first record, and if the worker has ended."""
        return None if self._backend is None else self._backend.worker_state()
