"""The backend of a process that may be a launcher: another one, which starts with the first record."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from torchotel._records import Alignment, Recordable
from torchotel._types import ConfigError
from torchotel._utils.faults import Guard
from torchotel.tracing.span import SpanContextSource
from torchotel.worker.backend import Backend, RunEnd
from torchotel.worker.stats import CaptureStats, Stats, WorkerState, no_stats
from torchotel.worker.status_page import PhaseWriter, new_page

MAX_WAITING = 1000
"""Records that wait for the start; a program that only logs values starts its backend with them."""
NOT_STARTED = "Nothing is exported or recorded by this process: %s"

_logger = logging.getLogger("torchotel")


class StartingPhaseWriter(PhaseWriter):
    """Write phases, and call a function in the first backward or optimizer step.

    A forward does not call it, because a worker of a DataLoader may have one, and the process group may not exist yet.
    """

    __slots__ = ("on_first",)

    def __init__(self, page: memoryview, thread: int) -> None:
        super().__init__(page, thread)
        self.on_first: Callable[[], object] | None = None

    def begin(self, kind: str, now_ns: int, *, grad: bool = True, alignment: Alignment | None = None) -> None:
        """Begin a phase."""
        super().begin(kind, now_ns, grad=grad, alignment=alignment)
        if self.on_first is not None and kind in {"backward", "optimizer"}:
            on_first, self.on_first = self.on_first, None
            on_first()


class DeferredBackend(Backend):
    """Start a backend in the first backward of the main thread, or with the first step or evaluation.

    A launcher has none of them. So it opens no port and no run folder, and has no companion process. From the first
    backward on, a crash leaves evidence.

    Args:
        make: Makes the backend, with a stack for the callbacks that release what is open, if a later part fails. A
            companion continues the phases of the writer.
        id_source: Fixes the ids of spans that the program reads while they run.
        capture_stats: Returns the counts of capture.
        begin: Fixes the identity of the process, and calls `fix_identity`.
    """

    def __init__(
        self,
        make: Callable[[ExitStack, PhaseWriter], Backend],
        id_source: SpanContextSource,
        capture_stats: Callable[[], CaptureStats],
        begin: Callable[[], object],
    ) -> None:
        self.id_source, self._capture_stats = id_source, capture_stats
        self._guard = Guard("the start of the worker", limit=1000)
        self.phase_log = self._phases = StartingPhaseWriter(new_page(), threading.main_thread().ident or 0)
        self._phases.on_first = self._guard.guarded(begin)
        self._make: Callable[[ExitStack], Backend] = lambda undo: make(undo, self._phases)
        self._lock = threading.RLock()  # reentrant: a signal handler may run while the backend starts
        self._backend: Backend | None = None
        self._waiting: deque[Recordable] = deque()
        """Records from before the start: logged values, and steps that a signal handler ended during the start."""
        self._starts_at = MAX_WAITING
        self._has_tried = self._ended = False
        self._dropped = self._dropped_at_flush = 0
        """Spans of the records that no backend got, now and at the last flush."""

    def fix_identity(self) -> None:
        """Start the backend with the first record of a kind, or pass the call on."""
        if self._backend is None:
            self._start()
        else:
            self._backend.fix_identity()

    def _start(self) -> None:
        """Start the backend, once, and pass the waiting records on."""
        with self._lock:
            if self._has_tried or self._ended:
                return
            self._has_tried = True
            backend: Backend | None = None
            try:
                backend = self._guard.guarded(self._make_started)()
                if backend is not None:
                    self._guard.guarded(backend.fix_identity)()
                if backend is None:
                    self._ended = True
                elif self._ended:  # a signal handler has shut down meanwhile
                    backend.discard()
                else:
                    self._backend = backend
            except BaseException:  # Ctrl-C: the next record tries again
                self._backend, self._has_tried, self._starts_at = None, False, 1
                if backend is not None:
                    self._phases.move_to(new_page())  # the backend takes its page along
                    backend.discard()
                raise
            self._pass_on()

    def _pass_on(self) -> None:
        """Pass the waiting records on, or count them without a backend."""
        while self._waiting and (self._backend is not None or self._ended):
            self.append(self._waiting[0])
            self._waiting.popleft()

    def _make_started(self) -> Backend | None:
        try:
            with ExitStack() as undo:
                backend = self._make(undo)
                backend.start(undo)
                undo.pop_all()
        except (ConfigError, OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
            _logger.warning(NOT_STARTED, error)
            return None
        return backend

    def append(self, record: Recordable) -> None:
        """Pass a record on; before the start it waits. Without a backend, drop it and count its spans."""
        if self._backend is None:
            with self._lock:  # another thread may start it now
                if self._backend is None and self._ended:
                    self._dropped += record.span_estimate()
                    return
                if self._backend is None:
                    self._waiting.append(record)
                    if len(self._waiting) >= self._starts_at:
                        self._start()
                    return
        self._backend.append(record)

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
            if self._waiting:
                self._start()
                self._pass_on()  # an interrupt may have ended the start before all were passed on
            dropped, self._dropped_at_flush = self._dropped - self._dropped_at_flush, self._dropped
            complete = not dropped and not self._waiting
        return complete if self._backend is None else self._backend.flush(timeout_s) and complete

    def stop(self, deadline_s: float, end: RunEnd) -> None:
        """Export the remaining records, end threads and processes, close ports and files."""
        with self._lock:
            if self._waiting:
                self._start()
                self._pass_on()
            self._ended = True
        if self._backend is not None:
            self._backend.stop(deadline_s, end)

    def discard(self) -> None:
        """End before the first record, and remove what was created."""
        with self._lock:
            self._ended = True
            self._waiting.clear()
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
            counts["spans_recorded"] += self._dropped
            counts["spans_dropped"] += self._dropped
            return counts
        capture, counts = self._capture_stats(), no_stats()
        counts["calls_dropped"], counts["stamps_dropped"] = capture.calls_dropped, capture.stamps_dropped
        counts["internal_errors"] = capture.internal_errors + self._guard.faults
        counts["spans_recorded"] = counts["spans_dropped"] = self._dropped
        return counts

    def worker_state(self) -> WorkerState | None:
        """Return the state of the worker; None before the first record, and if the worker has ended."""
        return None if self._backend is None else self._backend.worker_state()
