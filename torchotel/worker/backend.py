"""The part of a session behind the record boundary: metrics, spans, exporters and the run file, without torch."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torchotel._collectives import CollectiveReading
from torchotel._records import Error, Log, ModelInfo, PhaseLog, Record, Recordable, SpanReference, StepRecord
from torchotel._types import ConfigError
from torchotel._utils.faults import Guard, Warn
from torchotel._utils.gil import GilYielder
from torchotel._utils.installation import package_version
from torchotel._utils.process import is_child
from torchotel.config.config import Config
from torchotel.exporters.base import ExportStats, TraceExporter
from torchotel.exporters.factory import MetricExporters, make_exporters, make_trace_transport, open_record
from torchotel.exporters.otlp.json_encoder import JsonEncoder
from torchotel.exporters.run_folder import earlier_folders
from torchotel.metrics.store import Metrics
from torchotel.tracing.ids import IdGenerator, run_reference, run_trace
from torchotel.tracing.resource import ProcessResource
from torchotel.tracing.shared_trace import SharedTraces
from torchotel.tracing.span import SpanContextSource, Trace
from torchotel.tracing.span_templates import Templates
from torchotel.tracing.trace_builder import TraceBuilder
from torchotel.worker.buffer import Buffer
from torchotel.worker.collective_watch import CollectiveWatch
from torchotel.worker.pipeline import Pipeline
from torchotel.worker.stats import CaptureStats, Stats, WorkerState
from torchotel.worker.thread import Worker
from torchotel.worker.unsent_file import encode_unsent, start_finishing

if TYPE_CHECKING:
    from torchotel.exporters.prometheus.server import Listener
    from torchotel.exporters.run_folder import ClaimedFolder

EARLIER_RUNS_S = 2.0
"""Time at the shutdown for the last steps of earlier runs; what is not sent by then remains for the next run."""
METRICS_SHARE = 0.1
"""Share of the time of a shutdown that is kept for the last export of metrics, if traces take all the rest."""
_logger = logging.getLogger("torchotel")


class RunEnd(NamedTuple):
    """How a run ended."""

    finished: bool
    """Whether it came to a normal end."""
    error: Error | None = None
    """The exception that ended it."""
    shut_down: bool = True
    """Whether torchotel was shut down; False while the run goes on, and if the process has ended without."""


RUNNING = RunEnd(finished=False, shut_down=False)


class SessionLinks(NamedTuple):
    """Callbacks into the session."""

    model: Callable[[], ModelInfo | None]
    """Returns the model of the first step, None if it is unknown."""
    capture_stats: Callable[[], CaptureStats]
    overhead_ratio: Callable[[], float | None]
    """Returns the share of step time that detail costs, None if it is unknown."""
    on_step: Callable[[StepRecord, int], None]
    """Called after each step, with the CPU time that a worker of this process spent on it."""
    read_collectives: Callable[[], CollectiveReading | None]
    """Reads the flight recorder of this process; None: it has no process group."""


class Claims(NamedTuple):
    """What the process that called `instrument()` has claimed for the process that runs the exporters."""

    run_folder: ClaimedFolder | None = None
    listener: Listener | None = None
    """The port of the scrape endpoint."""


NO_CLAIMS = Claims()


class Backend(Protocol):
    """What the session needs of the part behind the record boundary."""

    id_source: SpanContextSource
    """Fixes the ids of spans that the program reads while they run."""
    phase_log: PhaseLog | None = None
    """Gets the phases of the main thread while they run; None without a companion process."""

    def append(self, record: Recordable) -> None:
        """Take over a record, on a training thread; never wait."""

    def start(self, undo: ExitStack) -> None:
        """Describe the run and start to process records.

        Args:
            undo: Gets the callback that stops it, if a later part fails.
        """

    @property
    def companion_pid(self) -> int | None:
        """The id of the companion process; None without one."""
        return None

    @property
    def prometheus_port(self) -> int | None:
        """The port that the scrape endpoint is bound to; None without a scrape endpoint."""

    @property
    def run_folder(self) -> Path | None:
        """The folder that the run is recorded in; None if it is not recorded."""

    def fix_identity(self) -> None:
        """Note that identity and model are final: the first record of a kind follows."""

    def flush(self, timeout_s: float) -> bool:
        """Export all records so far; return False on timeout, or if spans were dropped since the last flush."""

    def stop(self, deadline_s: float, end: RunEnd) -> None:
        """Export the remaining records, end threads and processes, close ports and files.

        Args:
            deadline_s: When this ends, in time of `time.monotonic()`.
            end: How the run ended, for the run file.
        """

    def discard(self) -> None:
        """End before the first record, and remove what was created."""

    def disable_after_fork(self) -> None:
        """Export nothing in a forked child."""

    def discard_run_file(self, *, only_empty: bool = False) -> None:
        """Remove the run file, or only if it has no record."""

    def stats(self) -> Stats:
        """Return the present counts."""

    def worker_state(self) -> WorkerState | None:
        """Return the state of the worker, with what `stats` has asked a companion process; None if it has ended."""


class ThreadBackend(Backend):
    """Process the records of a run on one thread.

    Args:
        config: The settings.
        resource: The resource; its identity is final before the first record.
        versions: The versions of torch and CUDA, by attribute.
        links: Callbacks into the session.
        undo: Gets the callbacks that release what is open, if a later part fails.
        exporters: Makes the trace exporters, instead of those of the settings.
        on_record: Called with each record, on the worker.
        may_record: Returns whether a child of multiprocessing may open a run file; called with the first record.
        defer_start: Open ports and push metrics only from the first record on.
        claims: What another process has claimed for this one.
        started_unix_ns: When the run started; 0: now.

    Raises:
        ConfigError: A folder or an address cannot be used.
    """

    def __init__(
        self,
        config: Config,
        resource: ProcessResource,
        versions: Mapping[str, str],
        links: SessionLinks,
        undo: ExitStack,
        *,
        exporters: Callable[[ExportStats], Sequence[TraceExporter]] | None = None,
        on_record: Callable[[Record], None] | None = None,
        may_record: Callable[[], bool] = lambda: True,
        defer_start: bool = False,
        claims: Claims = NO_CLAIMS,
        started_unix_ns: int = 0,
    ) -> None:
        self._config, self._resource, self._versions = config, resource, versions
        self._links, self._may_record = links, may_record
        self._started_unix_ns = started_unix_ns or time.time_ns()
        self.guard, self._warn = Guard("the worker", limit=1000), Warn()
        self._finisher: threading.Thread | None = None
        """Exports the last steps of earlier runs; None: there are none."""
        self._run: SpanReference | None = None
        """The ids of `torch.run`, which steps link to; None before the first step, or if no trace is sampled."""
        self._metrics = Metrics(
            self._outcomes,
            self._export_errors,
            links.overhead_ratio,
            module_histograms=config.module_histograms,
            exemplars=config.exemplar_filter != "always_off",
        )
        self._stats = ExportStats(self.guard.guarded(self._metrics.exported))
        # A child of multiprocessing may be a worker of a DataLoader, so it opens its run file with the first record.
        self._defers_run_file = exporters is None and is_child()
        opens = exporters is None and not self._defers_run_file
        self._run_file = open_record(config, resource, self._stats, claims.run_folder) if opens else None
        undo.callback(self.discard_run_file)
        made = (
            exporters(self._stats)
            if exporters is not None
            else make_exporters(config, resource, self._stats, self._run_file, self.guard)
        )
        self._exporters = list(made)
        providers = [one for one in self._exporters if isinstance(one, SpanContextSource)]  # the user's provider
        self.id_source = providers[0] if providers else IdGenerator(config.sampler, config.sampler_ratio)
        self._buffer = Buffer()
        yielder = GilYielder()
        templates = Templates(config.include, config.exclude, config.max_depth)
        shared = SharedTraces(lambda: resource.identity)
        self._builder = TraceBuilder(templates, config.max_spans, yielder, shared)
        self._pipeline = self._make_pipeline(yielder)
        self._worker = Worker(
            self._buffer,
            self._exporters,
            self._pipeline,
            CollectiveWatch(links.read_collectives, config.stall_timeout_s),
            on_record=on_record,
            guard=self.guard,
            warn=self._warn,
        )
        self._metric_exporters = MetricExporters(
            config,
            self._metrics,
            resource,
            package_version(),
            self._stats,
            os.environ,
            defer_start=defer_start or is_child(),
            listener=claims.listener,
        )
        undo.callback(lambda: self._metric_exporters.shutdown(time.monotonic(), finished=False))

    def append(self, record: Recordable) -> None:
        """Put a record into the buffer, which never waits for the worker."""
        self._buffer.append(record)

    def count_dropped(self, spans: int) -> None:
        """Count spans of records that were dropped before `append`, as if the buffer had dropped them."""
        self._buffer.count_dropped(spans)

    def wake(self) -> None:
        """Process the records now, and not at the next interval."""
        self._buffer.bell.ring()

    def add_reading(self, reading: CollectiveReading) -> None:
        """Pass a reading of the flight recorder on to the metrics and the run file, on the worker thread."""
        self._worker.add_reading(reading)

    def set_stalled(self, *, stalled: bool) -> None:
        """Set the metric that shows whether the training stalls."""
        self._metrics.set_stalled(stalled=stalled)

    def fix_identity(self) -> None:
        """Do nothing: the worker reads the identity and the model with its first record."""

    def start(self, undo: ExitStack) -> None:
        """Describe the run and start the thread."""
        self._write_run_info(RUNNING)
        self._worker.start()
        undo.callback(self._worker.stop, 0.0)
        self.guard.guarded(self._finish_earlier_runs)()

    def encode_unsent(self, records: Sequence[StepRecord]) -> list[bytes]:
        """Encode steps without module calls that have no record yet, for the file of the run folder."""
        encoder = JsonEncoder(self._resource, package_version())
        # Without module calls, nothing of the builder is used that the worker changes.
        return [encode_unsent(record, self._builder, self.id_source, encoder) for record in records]

    @property
    def spans_estimated(self) -> int:
        """The sum of the estimates of all processed records."""
        return self._pipeline.spans_estimated

    @property
    def prometheus_port(self) -> int | None:
        """The port that the scrape endpoint is bound to; None without a scrape endpoint."""
        return self._metric_exporters.port

    @property
    def run_folder(self) -> Path | None:
        """The folder that the run is recorded in; None if it is not recorded."""
        return None if self._run_file is None else self._run_file.folder

    def flush(self, timeout_s: float) -> bool:
        """Export all records in the buffer; return False on timeout, or if spans were dropped since the last flush."""
        deadline_s = time.monotonic() + timeout_s
        complete = self._worker.flush(timeout_s)
        return self._metric_exporters.flush(deadline_s) and complete

    def stop(self, deadline_s: float, end: RunEnd) -> None:
        """Export the remaining records, end the threads, close ports and files.

        Args:
            deadline_s: When this ends, in time of `time.monotonic()`.
            end: How the run ended, for the run file.

        Raises:
            KeyboardInterrupt: The user ended the waiting. All parts have ended nevertheless.
        """
        interrupt: KeyboardInterrupt | None = None
        metrics_s = (deadline_s - time.monotonic()) * METRICS_SHARE
        if not end.shut_down:
            self._metric_exporters.close_endpoint()
        for part in self._shutdown_parts(end, metrics_s):
            is_done = False
            while not is_done:
                try:
                    self.guard.guarded(part)(deadline_s)
                    is_done = True
                except KeyboardInterrupt as error:
                    deadline_s, interrupt = time.monotonic(), error
        if interrupt is not None:
            raise interrupt

    def _shutdown_parts(self, end: RunEnd, metrics_s: float) -> Iterator[Callable[[float], object]]:
        """Yield the functions that end the parts by a deadline; each may be called again after an interrupt."""

        def late(shutdown: Callable[[float], object], before_s: float) -> Callable[[float], object]:
            return lambda deadline_s: shutdown(max(deadline_s - before_s, time.monotonic() + 0.1))

        yield lambda deadline_s: self._worker.stop(deadline_s - metrics_s - time.monotonic())
        # The worker may have opened the run file of a child of multiprocessing meanwhile.
        for exporter in self._exporters:  # the run file last: it records how many spans were exported
            if exporter is self._run_file:
                yield lambda _: self._write_run_info(end)
            yield late(exporter.shutdown, metrics_s)
        # After the trace exporters, whose counts it exports.
        yield late(partial(self._metric_exporters.shutdown, finished=end.finished), 0.0)
        if self._finisher is not None:
            finisher = self._finisher
            yield lambda deadline_s: finisher.join(max(0.0, min(EARLIER_RUNS_S, deadline_s - time.monotonic())))

    def discard(self) -> None:
        """Stop at once, and remove the run file."""
        self.stop(time.monotonic(), RunEnd(finished=False))
        self.discard_run_file()

    def disable_after_fork(self) -> None:
        """Export nothing in a forked child, which has no worker thread."""
        self._metric_exporters.disable_after_fork()

    def discard_run_file(self, *, only_empty: bool = False) -> None:
        """Remove the run file, or only if it has no record."""
        if self._run_file is not None and (self._run_file.empty or not only_empty):
            self._run_file.discard()

    def stats(self) -> Stats:
        """Return the present counts."""
        counts, capture, worker = self._stats.read(), self._links.capture_stats(), self._worker
        return Stats(
            spans_recorded=worker.spans_recorded,
            spans_exported=counts.exported,
            spans_dropped=counts.dropped + worker.spans_dropped,
            spans_sampled_out=counts.sampled_out + worker.spans_sampled_out,
            export_errors=sum(counts.errors.values()),
            steps=worker.counts["step"],
            evaluations=worker.counts["evaluation"],
            steps_detailed=worker.detailed,
            calls_dropped=capture.calls_dropped,
            stamps_dropped=capture.stamps_dropped,
            internal_errors=capture.internal_errors + self.guard.faults + self._metric_exporters.guard.faults,
            overhead_ratio=self._links.overhead_ratio(),
        )

    def worker_state(self) -> WorkerState:
        """Return the state of the worker thread."""
        lag_ns = self._worker.lag_ns
        return WorkerState(
            kind="thread",
            pid=os.getpid(),
            memory_bytes=None,
            lag_s=None if lag_ns is None else lag_ns / 1e9,
            last_error=self._stats.last_error,
        )

    def before_first(self, record: Record) -> Trace | None:
        """Start deferred exporters before the first record of a kind; before the first step, return the run's trace."""
        identity = self._resource.identity
        # A process without ranks has a run span of its own, from its first step on: siblings may have the same run id,
        # and a process that only evaluates exports no run span.
        if self._run is None and not self.id_source.off and (identity.world_size != 1 or record.kind == "step"):
            self._run = run_reference(identity)
            self._builder.link_steps_to(self._run)
        self._open_deferred_run_file()
        if isinstance(record, Log):
            return None
        if record.kind == "step" or not is_child():  # a DataLoader's worker has evaluations, too
            self._metric_exporters.first_record()
        if record.kind != "step":
            return None
        self._write_run_info(RUNNING)
        if self._run is None or identity.rank != 0:
            return None  # all ranks have the same span of the run, so one exports it
        time_ns = record.start_ns + record.unix_offset_ns
        return run_trace(self._run, time_ns, self._links.model(), self._config.public(), self._versions)

    def step_processed(self, step: StepRecord, worker_ns: int) -> None:
        """Pass a step on, with the CPU time that the worker spent on it."""
        self._links.on_step(step, worker_ns)

    def _make_pipeline(self, yielder: GilYielder) -> Pipeline:
        return Pipeline(
            self._builder,
            self._exporters,
            self.id_source,
            self._metrics,
            yielder,
            listener=self,
            run_file=self._run_file,
            guard=self.guard,
            warn=self._warn,
        )

    def _finish_earlier_runs(self) -> None:
        """Export the last steps that earlier runs of this name left, on a thread of its own."""
        if self._run_file is not None and self._config.record is not None:
            earlier = earlier_folders(self._config.record, self._run_file.folder)
            self._finisher = start_finishing(earlier, lambda: make_trace_transport(self._config), self.guard)

    def _outcomes(self) -> dict[str, int]:
        """Count spans by outcome, as `torchotel.spans`; those that the buffer dropped are in `dropped_queue`."""
        counts = self._stats.read()
        return {
            "exported": counts.exported,
            "dropped_queue": counts.dropped_queue + self._worker.spans_dropped,
            "dropped_export": counts.dropped - counts.dropped_queue,
            "sampled_out": counts.sampled_out + self._worker.spans_sampled_out,
        }

    def _export_errors(self) -> Mapping[str, int]:
        """Count failed attempts to export, by the type of the error."""
        return self._stats.read().errors

    def _open_deferred_run_file(self) -> None:
        if self._defers_run_file and self._may_record():
            self._defers_run_file = False
            try:
                self._run_file = open_record(self._config, self._resource, self._stats)
            except ConfigError as error:
                _logger.warning("this process is not recorded: %s", error)
            if self._run_file is not None:
                self._exporters.append(self._run_file)
                self._pipeline.record_to(self._run_file)

    def _write_run_info(self, end: RunEnd) -> None:
        if self._run_file is None:
            return
        model = self._links.model()
        self._run_file.describe(
            {
                "torchotel.version": package_version(),
                "run_id": self._resource.identity.run_id,
                **({"launch": launch} if (launch := self._resource.identity.launch) else {}),
                "service_name": self._resource["service.name"],
                "config": self._config.public(),
                "resource": self._resource,
                "model": model._asdict() if model is not None else None,
                "started_unix_nano": str(self._started_unix_ns),
                "finished": end.shut_down,
                "error": end.error._asdict() if end.error is not None else None,
                "spans": self.stats(),
            }
        )
