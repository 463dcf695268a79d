"""The backend that sends the records of a run to a companion process, which it starts, restarts and ends."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchotel._records import Recordable, StepRecord
from torchotel._utils.faults import Guard, Warn
from torchotel._utils.process import is_traced, resident_bytes
from torchotel.config.config import Config
from torchotel.exporters.factory import claim_endpoint, claim_run_folder
from torchotel.exporters.run_folder import METRICS_NAME, TRACE_GLOB, discard_folder
from torchotel.exporters.sdk.global_provider import find_provider
from torchotel.tracing.ids import IdGenerator
from torchotel.tracing.resource import ProcessResource
from torchotel.worker.backend import Backend, RunEnd, SessionLinks
from torchotel.worker.channel import Sender
from torchotel.worker.companion_handle import EXIT_S, Companion
from torchotel.worker.end_cause import FatalSignals
from torchotel.worker.record_codec import CompanionSettings, RecordEncoder, RunStart
from torchotel.worker.stall_watch import StackSignal
from torchotel.worker.stats import CaptureStats, Stats, WorkerState, add_stats, no_stats
from torchotel.worker.status_page import PhaseWriter, hide_phases, new_page, write_counts, write_stack_signal
from torchotel.worker.unsent_file import UNSENT_NAME, UnsentFile

if TYPE_CHECKING:
    from torchotel.exporters.prometheus.endpoint import DiscoveryFile
    from torchotel.exporters.prometheus.server import Listener
    from torchotel.exporters.run_folder import ClaimedFolder

WAKE_SHARE = 8
"""The companion is woken before its interval when the waiting records fill this part of the ring, an eighth."""
COUNTS_NS = 1_000_000_000
"""Time between two writes of the counts of capture."""
ANSWER_S = 1.0
"""Longest wait for the counts of `stats()`; after it, the last counts are returned."""

RESTARTED = "The companion process has ended with exit code %s and was started again; up to %d spans are lost"
ENDED = (
    "The companion process has ended with exit code %s. Training is not affected, and nothing more is exported. Set "
    "TORCHOTEL_WORKER=thread to work without it."
)

KILLED = (
    "The companion process did not end before the deadline of shutdown and was killed; up to %d spans are lost. Call "
    "shutdown() with a longer timeout_s."
)

TOO_LARGE = (
    "Steps in detail are dropped: the record of one takes %d bytes, and channel_bytes (TORCHOTEL_CHANNEL_BYTES) is %d. "
    "Set channel_bytes to ten times the size of a record, or leave it out"
)

_logger = logging.getLogger("torchotel")


class CompanionBackend(Backend):
    """Send the records of a run to a companion process, which processes them as a `ThreadBackend` does.

    Args:
        config: The settings.
        resource: The resource; its identity is final before the first record.
        versions: The versions of torch and CUDA, by attribute.
        links: Callbacks into the session; `on_step` runs on the training thread.
        undo: Gets the callbacks that release what is open, if a later part fails.
        started_unix_ns: When the run started.
        phase_log: The writer of the phases so far; None: there were none.

    Raises:
        ConfigError: A folder or an address cannot be used.
        OSError: The system has no memory files.
    """

    def __init__(
        self,
        config: Config,
        resource: ProcessResource,
        versions: Mapping[str, str],
        links: SessionLinks,
        undo: ExitStack,
        started_unix_ns: int,
        phase_log: PhaseWriter | None = None,
    ) -> None:
        self._config, self._resource, self._versions = config, resource, versions
        self._links = links
        self.id_source = IdGenerator(config.sampler, config.sampler_ratio)
        self._guard = Guard("the channel to the companion", limit=1000)
        self._warn = Warn()
        self._channel, self._encoder = Sender(config.channel_bytes), RecordEncoder()
        self.phase_log = phase_log or PhaseWriter(new_page(), threading.main_thread().ident or 0)
        self.phase_log.move_to(self._channel.page)
        # Reentrant: a signal handler may end a step while a record is sent. That record is then sent after this one.
        self._lock = threading.RLock()
        self._unsent: deque[Recordable | RunStart] = deque()
        self._is_sending = False
        self._spans = self._late_spans = 0
        """Spans of the records for this companion, and of those after its stop.

        These are estimates, as those of a full buffer: the spans are not built yet.
        """
        self._worker_answer: dict[str, Any] = {}
        """The state of the companion's worker in its last answer."""
        self._counts_ns = 0
        """When the counts of capture were written to the status page."""
        self._earlier_counts = no_stats()
        """The counts of the companion that was replaced."""
        self._may_restart, self._stopped = True, False
        self._run_start: RunStart | None = None
        self._started_unix_ns = started_unix_ns
        self._claimed: ClaimedFolder | None = None
        self._unsent_file: UnsentFile | None = None
        self._listener: Listener | None = None
        self._target: DiscoveryFile | None = None
        with ExitStack() as failed:
            failed.callback(self._channel.close)
            failed.callback(self.discard_run_file)
            failed.callback(self._close_claims)
            self._claimed = claim_run_folder(config, resource.identity)
            if self._claimed is not None:
                with suppress(OSError):  # not needed before the training and the companion end together
                    self._unsent_file = UnsentFile(self._claimed.path / UNSENT_NAME)
            self._signals = FatalSignals()
            failed.callback(self._signals.close)
            self._stack_signal = StackSignal()
            write_counts(self._channel.page, CaptureStats(0, 0, 0), None)
            write_stack_signal(self._channel.page, self._stack_signal.usable())
            if (endpoint := claim_endpoint(config, resource, os.environ)) is not None:
                self._listener, self._target = endpoint
            self._port = None if self._listener is None else self._listener.port
            with self._lock:  # a companion that ends at once is replaced after it is set
                self._companion = self._start_companion()
            undo.push(failed.pop_all())
            undo.callback(self._kill)

    @property
    def companion_pid(self) -> int | None:
        """The id of the companion process; None after the stop."""
        return None if self._stopped else self._companion.pid

    @property
    def prometheus_port(self) -> int | None:
        """The port that the scrape endpoint is bound to; None without a scrape endpoint."""
        return self._port

    @property
    def run_folder(self) -> Path | None:
        """The folder that the run is recorded in; None if it is not recorded."""
        return None if self._claimed is None else self._claimed.path

    def start(self, undo: ExitStack) -> None:
        """Do nothing: the companion runs already."""

    def fix_identity(self) -> None:
        """Send identity and model, which are final from the first record on."""
        self._run_start = RunStart(self._resource.identity, self._links.model())
        self._send_in_order(self._run_start)

    def append(self, record: Recordable) -> None:
        """Send a record; if the channel is full or broken, drop it and count its spans."""
        self._send_in_order(record)

    def flush(self, timeout_s: float) -> bool:
        """Export all records so far; return False on timeout, or if spans were dropped since the last flush."""
        self._guard.guarded(self._write_counts)()
        answer = self._companion.ask("flush", float(timeout_s))
        return answer is not None and bool(answer["complete"])

    def stop(self, deadline_s: float, end: RunEnd) -> None:
        """Let the companion export the remaining records and end; kill it at the deadline."""
        with self._lock:  # the control thread may start another companion
            self._may_restart, stopped, self._stopped = False, self._stopped, True
            companion = self._companion
        if stopped:
            return
        error = None if end.error is None else tuple(end.error)
        self._guard.guarded(self._write_counts)()
        left_s, end_s = deadline_s - time.monotonic(), max(deadline_s, time.monotonic()) + EXIT_S
        try:
            companion.ask("stop", left_s, EXIT_S, finished=end.finished, error=error)
            if companion.end(end_s):
                _logger.warning(KILLED, self._companion_counts()["spans_dropped"])
        finally:  # after Ctrl-C the companion ends by itself, at the deadline
            self._close()

    def discard(self) -> None:
        """Kill the companion, and remove the run file and the target of the scrape endpoint."""
        self._kill()
        self._close()
        if self._target is not None:
            self._target.remove()
        self.discard_run_file()

    def disable_after_fork(self) -> None:
        """Close the copies of the channel, the port and the run file in a forked child."""
        stopped, self._stopped = self._stopped, True
        if not stopped:
            self._companion.disable_after_fork()
            self._signals.close()
            StackSignal.disable_after_fork()
            self._close_claims()
            self._channel.close()

    def discard_run_file(self, *, only_empty: bool = False) -> None:
        """Remove the run file, which must be empty, or only if it is."""
        if self._claimed is not None and not (only_empty and not _is_empty(self._claimed.path)):
            self._remove_unsent()
            discard_folder(self._claimed.path)

    def stats(self) -> Stats:
        """Return the counts of both processes."""
        answer = None if self._stopped else self._companion.ask("stats", ANSWER_S)
        self._worker_answer = {} if answer is None else answer["worker"]
        with self._lock:
            counts = add_stats(self._earlier_counts, self._companion_counts())
        counts["spans_recorded"] += self._late_spans
        counts["spans_dropped"] += self._late_spans
        capture = self._links.capture_stats()
        counts["calls_dropped"], counts["stamps_dropped"] = capture.calls_dropped, capture.stamps_dropped
        counts["internal_errors"] += capture.internal_errors + self._guard.faults
        counts["overhead_ratio"] = self._links.overhead_ratio()
        return counts

    def worker_state(self) -> WorkerState | None:
        """Return the state of the companion, as of its answer for the last `stats`; None if it has ended."""
        companion = self._companion
        if self._stopped or not companion.alive:
            return None
        return WorkerState(
            kind="process",
            pid=companion.pid,
            memory_bytes=resident_bytes(companion.pid),
            lag_s=self._worker_answer.get("lag_s"),
            last_error=self._worker_answer.get("last_error"),
        )

    def _send_in_order(self, item: Recordable | RunStart) -> None:
        with self._lock:
            self._unsent.append(item)
            if self._is_sending:  # this is a signal handler
                return
            self._is_sending = True
            try:
                while self._unsent:
                    self._send_or_drop(self._unsent.popleft())
            finally:
                self._is_sending = False

    def _send_or_drop(self, item: Recordable | RunStart) -> None:
        if isinstance(item, RunStart):
            if not self._stopped:
                self._channel.send(self._encoder.encode_start(item))
        elif self._stopped:
            self._late_spans += item.span_estimate()
        else:
            spans = item.span_estimate()
            if not self._guard.guarded(self._send)(item):
                self._spans += spans
                self._channel.count_dropped(spans)

    def _send(self, pending: Recordable) -> bool:
        record = pending.record()
        if isinstance(record, StepRecord) and record.kind == "step":
            self._links.on_step(record, 0)
            if record.end_ns - self._counts_ns > COUNTS_NS:
                self._counts_ns = record.end_ns
                self._guard.guarded(self._write_counts)()
        companion = self._companion
        if not companion.alive:
            return False
        waited = self._channel.waiting
        message = self._encoder.encode(record)
        if not self._channel.send(message):
            self._encoder.retract()
            if len(message) > self._config.channel_bytes:
                self._warn(TOO_LARGE, len(message), self._config.channel_bytes, key=TOO_LARGE)
            return False
        self._spans += record.span_estimate()
        self._encoder.confirm()
        if waited <= self._config.channel_bytes // WAKE_SHARE < self._channel.waiting:
            companion.wake()
        return True

    def _write_counts(self) -> None:
        """Write what only this process knows to the status page: counts for the metrics, and the signal for stacks."""
        page = self._channel.page
        write_counts(page, self._links.capture_stats(), self._links.overhead_ratio())
        write_stack_signal(page, self._stack_signal.usable())

    def _companion_counts(self) -> Stats:
        """Return the counts of the companion; if it ended too early, its spans that are not exported are lost."""
        companion = self._companion
        counts = companion.counts.copy()
        if companion.ended_early:
            counts["spans_recorded"] += max(0, self._spans - companion.spans_estimated)
            counts["spans_dropped"] = counts["spans_recorded"] - counts["spans_exported"] - counts["spans_sampled_out"]
        return counts

    def _on_end(self, exit_code: str) -> None:
        """Start another companion in place of one that ended by itself, once; called on the control thread."""
        lost = None
        try:
            with self._lock:  # `stop` and the end of a step wait until the process is created
                lost = self._restart()
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
            _logger.warning("The companion process cannot be started again: %s", error)
        if lost is None:
            self._remove_unsent()
            with self._lock:
                self._close_claims()
            _logger.error(ENDED, exit_code)
        else:
            _logger.warning(RESTARTED, exit_code, lost)

    def _restart(self) -> int | None:
        """Start another companion and return how many spans are lost; return None if none may be started."""
        if not self._may_restart:
            return None
        self._may_restart = False
        counts = self._companion_counts()
        hide_phases(self._channel.page)
        self._channel.clear()  # its records refer to definitions that the next companion does not have
        self._encoder = RecordEncoder()
        if self._run_start is not None:
            self._channel.send(self._encoder.encode_start(self._run_start))
        self._companion = self._start_companion()
        self._earlier_counts, self._spans = counts, 0
        return counts["spans_dropped"]

    def _kill(self) -> None:
        with self._lock:
            self._may_restart, self._stopped = False, True
        self._companion.kill()

    def _close(self) -> None:
        self._signals.close()
        self._remove_unsent()
        with self._lock:
            self._close_claims()
            if not self._is_sending:  # else a signal handler stops during a record, which is written when it returns
                self._channel.close()

    def _remove_unsent(self) -> None:
        """Remove the file of steps without a record, after the companion has ended while this process lives."""
        if self._unsent_file is not None:
            self._unsent_file.remove()

    def _close_claims(self) -> None:
        metrics = None if self._claimed is None else self._claimed.metrics
        for claim in (metrics, self._unsent_file, self._listener):
            if claim is not None:
                claim.close()

    def _start_companion(self) -> Companion:
        """Start a companion, which loads its modules while the training goes on."""
        config, claimed, unsent, listener = self._config, self._claimed, self._unsent_file, self._listener
        settings = CompanionSettings(
            pid=os.getpid(),
            config={field.name: getattr(config, field.name) for field in fields(config)},
            described=dict(self._resource.described),
            identity=self._resource.identity,
            versions=dict(self._versions),
            run_folder=None if claimed is None else os.fspath(claimed.path),
            metrics_fd=None if claimed is None else claimed.metrics.fileno(),
            unsent_fd=None if unsent is None else unsent.fileno(),
            listener_fd=None if listener is None else listener.fileno(),
            signals_fd=self._signals.fd,
            stacks_fd=self._stack_signal.fd,
            started_unix_ns=self._started_unix_ns,
            log_level=_logger.getEffectiveLevel(),
        )
        return Companion(self._channel.fd, settings, self._links.read_collectives, self._on_end, self._guard)


def needs_thread(config: Config) -> str | None:
    """Return why records must be processed in the training process; None if a companion can process them."""
    reasons = {
        "the program has its own TracerProvider": find_provider(config.tracer_provider) is not None,
        "set_global_provider is set": config.set_global_provider,
        "the program has its own MeterProvider": config.meter_provider is not None,
        "the program has its own registry": config.prometheus_registry is not None,
        "the console exporter writes to this process's output": config.traces_exporter == "console",
        "a debugger or a measurement of coverage traces the program": is_traced(),
        "the program has closed its standard input, output or errors": not all(map(_is_open, range(3))),
        "the program handles SIGCHLD, which the end of a companion would send": _handles_sigchld(),
        "this interpreter cannot be started again": getattr(sys, "frozen", False) or not _is_python(sys.executable),
        "this system has no memory files": not hasattr(os, "memfd_create"),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _is_python(executable: str) -> bool:
    """Return whether a program is a Python interpreter, and not a server with one inside, such as uWSGI."""
    return Path(executable or "").name.startswith(("python", "pypy"))


def _is_open(fd: int) -> bool:
    """Return whether a descriptor is open; else one of torchotel's may get its number.

    In the companion, the numbers below 3 are its own standard streams, so it could not get such a descriptor.
    """
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _handles_sigchld() -> bool:
    """Return whether the program has a handler of SIGCHLD; that of torch looks at the workers of a DataLoader only."""
    handler = signal.getsignal(signal.SIGCHLD)
    return callable(handler) and not str(getattr(handler, "__module__", "")).startswith("torch.")


def _is_empty(folder: Path) -> bool:
    metrics = folder / METRICS_NAME
    return not any(folder.glob(TRACE_GLOB)) and (not metrics.exists() or metrics.stat().st_size == 0)
