"""A session: capture, worker and exporters, from `instrument()` to `shutdown()`."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TypedDict

import torch
from opentelemetry.context import get_current
from torch.utils.data import get_worker_info

from torchotel import _semconv as names
from torchotel._records import Log, Record, StepRecord
from torchotel._types import ConfigError
from torchotel._utils.distributed import Identity, identify, own_run
from torchotel._utils.faults import Guard, Warn
from torchotel._utils.gil import GilYielder
from torchotel._utils.installation import package_version
from torchotel._utils.process import is_child, script_name
from torchotel.capture.recorder import Capture
from torchotel.config.config import Config
from torchotel.exporters.base import ExportStats, TraceExporter
from torchotel.exporters.factory import MetricExporters, make_exporters, open_record
from torchotel.exporters.sdk.global_provider import import_despite_limit
from torchotel.integrations.registry import Frameworks
from torchotel.metrics.store import Metrics
from torchotel.sampling.detail import Detail, Overhead, sampling_interval
from torchotel.tracing.context import attach_proxy, current_baggage, current_span
from torchotel.tracing.ids import IdGenerator, run_reference, run_trace
from torchotel.tracing.resource import ProcessResource, describe_process
from torchotel.tracing.span import SpanContextSource, Trace
from torchotel.tracing.span_templates import Templates
from torchotel.tracing.trace_builder import TraceBuilder
from torchotel.worker.buffer import Buffer
from torchotel.worker.pipeline import Pipeline
from torchotel.worker.thread import Worker


class Stats(TypedDict):
    """Counts of spans, steps, evaluations and errors since `instrument()`."""

    spans_recorded: int
    spans_exported: int
    spans_dropped: int
    spans_sampled_out: int
    export_errors: int
    """Failed attempts to export; each retry counts."""
    steps: int
    evaluations: int
    steps_detailed: int
    calls_dropped: int
    stamps_dropped: int
    """Timestamps of backwards beyond the limit of one step, for example if one graph runs backward very many times."""
    internal_errors: int
    """Errors in torchotel, which never reach the program."""
    overhead_ratio: float | None
    """Share of step time that detail costs; None until steps with and without detail were compared."""


def no_stats() -> Stats:
    """Return the counts of a handle without a session."""
    return Stats(
        spans_recorded=0,
        spans_exported=0,
        spans_dropped=0,
        spans_sampled_out=0,
        export_errors=0,
        steps=0,
        evaluations=0,
        steps_detailed=0,
        calls_dropped=0,
        stamps_dropped=0,
        internal_errors=0,
        overhead_ratio=None,
    )


_logger = logging.getLogger("torchotel")


class Session:
    """Compose capture, worker and exporters, and run them until `stop`.

    Args:
        config: The settings.
        model: Its modules get their full names from the first call on.
        exporters: Makes the trace exporters, instead of those of the settings.
        on_record: Called with each record, on the worker.
        defer_start: Open ports and push metrics only from the first record on: this process may be a launcher.

    Raises:
        ConfigError: A folder or an address cannot be used. Nothing was installed.
    """

    def __init__(
        self,
        config: Config,
        model: torch.nn.Module | None,
        exporters: Callable[[ExportStats], Sequence[TraceExporter]] | None = None,
        *,
        on_record: Callable[[Record], None] | None = None,
        defer_start: bool = False,
    ) -> None:
        self._config = config
        import_despite_limit()
        self._guard = Guard("the session", limit=1000)
        self._overhead, self._detail = Overhead(), Detail(config.detail)
        self._metrics = Metrics(
            self._outcomes,
            lambda: self._stats.read().errors,
            lambda: self._overhead.ratio,
            module_histograms=config.module_histograms,
            exemplars=config.exemplar_filter != "always_off",
        )
        self._stats = ExportStats(self._guard.guarded(self._metrics.exported))
        described = describe_process(config.service_name, script_name(), _torch_versions())
        self._identity_fixed = False
        self._resource = ProcessResource(described, self._identify)
        self._started_ns = time.time_ns()
        # A child of multiprocessing may be a worker of a DataLoader, so it opens its run file with the first record.
        self._defers_run_file = exporters is None and is_child()
        opens = exporters is None and not self._defers_run_file
        self._record = open_record(config, self._resource, self._stats) if opens else None
        with ExitStack() as undo:  # closes what is open if a later part fails
            undo.callback(self._discard_record)
            made = None if exporters is None else exporters(self._stats)
            self._build(model, made, on_record, undo, defer_start=defer_start)
            undo.pop_all()

    def _build(
        self,
        model: torch.nn.Module | None,
        exporters: Sequence[TraceExporter] | None,
        on_record: Callable[[Record], None] | None,
        undo: ExitStack,
        *,
        defer_start: bool,
    ) -> None:
        config = self._config
        if exporters is None:
            exporters = make_exporters(config, self._resource, self._stats, self._record, self._guard)
        self._exporters = list(exporters)
        providers = [one for one in self._exporters if isinstance(one, SpanContextSource)]  # the user's provider
        self._id_source = providers[0] if providers else IdGenerator(config.sampler, config.sampler_ratio)
        buffer, self._warn = Buffer(), Warn()
        worker_guard = Guard("the worker", limit=1000)
        self._pipeline = self._make_pipeline(worker_guard)
        self._worker = Worker(
            buffer, self._exporters, self._pipeline, on_record=on_record, guard=worker_guard, warn=self._warn
        )
        self._capture = Capture(
            buffer.append,
            self._detail,
            shapes=config.shapes,
            exception_text=config.exception_text,
            gradient_norms=config.gradient_norms,
            user_span=current_span,
            baggage=current_baggage,
            start_span=self._id_source.start,
            make_current=attach_proxy,
            context=get_current,
            warn=self._warn,
            on_first=self._guard.guarded(self._fix_identity),
        )
        guarded = self._capture.guard.guarded
        self.log, self.watch = guarded(self._capture.log), guarded(self._capture.watches.watch)
        self.name = guarded(self._capture.name)
        self.step_begins, self.step_ends = guarded(self._capture.step_begins), guarded(self._capture.step_ends)
        self.ask_detail = guarded(self._capture.ask_detail)
        self._frameworks = Frameworks(partial(self._capture.log, offered=True))
        self._metric_exporters = MetricExporters(
            config,
            self._metrics,
            self._resource,
            package_version(),
            self._stats,
            os.environ,
            defer_start=defer_start or is_child(),
        )
        undo.callback(lambda: self._metric_exporters.shutdown(time.monotonic(), finished=False))
        self._write_run_info(finished=False)
        self._worker.start()
        undo.callback(self._worker.stop, 0.0)
        undo.callback(self._capture.uninstall)
        if model is not None:
            self._capture.register_model(model)
        self._capture.install()
        undo.callback(self._frameworks.uninstall)
        self._frameworks.install()

    @property
    def prometheus_port(self) -> int | None:
        """The port that the scrape endpoint is bound to; None without a scrape endpoint."""
        return self._metric_exporters.port

    @property
    def record_folder(self) -> Path | None:
        """The folder that the run is recorded in; None if it is not recorded."""
        return None if self._record is None else self._record.folder

    @property
    def began(self) -> bool:
        """Whether a step or an evaluation has begun."""
        return any(thread.step_detector.in_step for thread in self._capture.threads.all) or any(
            self._capture.output.numbers.values()
        )

    def register_model(self, model: torch.nn.Module) -> None:
        """Give the modules of a model their full names before its first call."""
        self._capture.register_model(model)

    def flush(self, timeout_s: float) -> bool:
        """Export all finished records; return False on timeout, or if spans were dropped since the last flush."""
        self._guard.guarded(self._capture.flush)()
        deadline_s = time.monotonic() + timeout_s
        complete = self._worker.flush(timeout_s)
        return self._metric_exporters.flush(deadline_s) and complete

    def pause(self) -> None:
        """Remove every hook, and hand the recorded steps to the worker."""
        self._guard.guarded(self._capture.pause)()

    def resume(self) -> None:
        """Install the hooks again."""
        self._guard.guarded(self._capture.resume)()

    def disable_after_fork(self) -> None:
        """Remove every hook and export nothing: a forked child has no worker thread."""
        self._frameworks.uninstall()
        self._capture.disable_after_fork()
        self._metric_exporters.disable_after_fork()

    def discard_empty(self) -> None:
        """Remove the run file after `stop` if it has no record."""
        if self._record is not None and self._record.empty:
            self._record.discard()

    def discard(self) -> None:
        """Stop before the first record, and remove the run file."""
        self.stop(0, finished=False)
        self._discard_record()

    def stop(self, timeout_s: float, *, finished: bool = True, error: BaseException | None = None) -> None:
        """Remove every hook, export the remaining records, end the threads, close ports and files.

        Args:
            timeout_s: How many seconds the whole stop may take.
            finished: Whether the run came to a normal end.
            error: The exception that ended the run, for the run file.
        """
        deadline_s, guarded = time.monotonic() + timeout_s, self._guard.guarded
        guarded(self._frameworks.uninstall)()
        guarded(self._capture.uninstall)()
        guarded(self._capture.end)()
        guarded(self._worker.stop)(deadline_s - time.monotonic())
        for exporter in self._exporters:  # the run file last: it records how many spans were exported
            if exporter is self._record:
                guarded(self._write_run_info)(finished=True, error=error)
            guarded(exporter.shutdown)(max(deadline_s, time.monotonic() + 0.1))
        # After the trace exporters, whose counts it exports.
        guarded(self._metric_exporters.shutdown)(max(deadline_s, time.monotonic() + 0.1), finished=finished)

    def stats(self) -> Stats:
        """Return the present counts."""
        counts = self._stats.read()
        capture = self._capture
        optional = (capture.gradients, capture.watches, capture.memory, capture.rates, capture.device_marks)
        parts = (capture, *optional, self._worker, self._metric_exporters, self._frameworks)
        guards = [self._guard, *(part.guard for part in parts)]
        return Stats(
            spans_recorded=self._worker.spans_recorded,
            spans_exported=counts.exported,
            spans_dropped=counts.dropped + self._worker.spans_dropped,
            spans_sampled_out=counts.sampled_out + self._worker.spans_sampled_out,
            export_errors=sum(counts.errors.values()),
            steps=self._worker.counts["step"],
            evaluations=self._worker.counts["evaluation"],
            steps_detailed=self._worker.detailed,
            calls_dropped=self._capture.switch.calls_dropped,
            stamps_dropped=self._capture.switch.timestamps_dropped,
            internal_errors=sum(guard.faults for guard in guards),
            overhead_ratio=self._overhead.ratio,
        )

    def _discard_record(self) -> None:
        if self._record is not None:
            self._record.discard()

    def _identify(self) -> Identity:
        return identify(os.environ, self._config.run_id, own_run.current())

    def _fix_identity(self) -> None:
        """Find the final identity with the first step, on the training thread: the process group exists by then."""
        if not self._identity_fixed:
            self._identity_fixed = True
            own_run.use()
            self._resource.update()

    def _open_deferred_run_file(self) -> None:
        if self._defers_run_file and get_worker_info() is None:
            self._defers_run_file = False
            try:
                self._record = open_record(self._config, self._resource, self._stats)
            except ConfigError as error:
                _logger.warning("this process is not recorded: %s", error)
            if self._record is not None:
                self._exporters.append(self._record)
                self._pipeline.record_to(self._record)

    def _make_pipeline(self, guard: Guard) -> Pipeline:
        config, yielder = self._config, GilYielder()
        templates = Templates(config.include, config.exclude, config.max_depth)
        self._builder = TraceBuilder(templates, config.max_spans, yielder)
        return Pipeline(
            self._builder,
            self._exporters,
            self._id_source,
            self._metrics,
            yielder,
            listener=self,
            run_file=self._record,
            guard=guard,
            warn=self._warn,
        )

    def _outcomes(self) -> dict[str, int]:
        """Count spans by outcome, as `torchotel.spans`; those that the buffer dropped are in `dropped_queue`."""
        counts = self._stats.read()
        return {
            "exported": counts.exported,
            "dropped_queue": counts.dropped_queue + self._worker.spans_dropped,
            "dropped_export": counts.dropped - counts.dropped_queue,
            "sampled_out": counts.sampled_out + self._worker.spans_sampled_out,
        }

    def before_first(self, record: Record) -> Trace | None:
        """Start deferred exporters before the first record of a kind; before the first step, return the run's trace."""
        identity = self._resource.identity
        run = run_reference(identity.run_id, identity.generation)
        self._builder.link_steps_to(run)
        self._open_deferred_run_file()
        if isinstance(record, Log):
            return None
        if record.kind == "step" or not is_child():  # a DataLoader's worker has evaluations, too
            self._metric_exporters.first_record()
        if record.kind != "step":
            return None
        self._write_run_info(finished=False)
        if identity.rank != 0:
            return None  # all ranks have the same span of the run, so one exports it
        time_ns = record.start_ns + record.unix_offset_ns
        return run_trace(run, time_ns, self._capture.model, self._config.public(), _torch_versions())

    def step_processed(self, step: StepRecord, worker_ns: int) -> None:
        """Measure the overhead of detail, and set the interval of detailed steps."""
        self._overhead.add(step, worker_ns)
        slowdown = self._overhead.upper_bound
        if self._detail.steered and step.detailed and slowdown is not None:
            self._detail.every = sampling_interval(self._config.overhead_budget, slowdown, self._detail.every)

    def _write_run_info(self, *, finished: bool, error: BaseException | None = None) -> None:
        if self._record is None:
            return
        failure = self._capture.errors.read(error)
        model = self._capture.model
        self._record.describe(
            {
                "torchotel.version": package_version(),
                "run_id": self._resource.identity.run_id,
                "service_name": self._resource["service.name"],
                "config": self._config.public(),
                "resource": self._resource,
                "model": model._asdict() if model is not None else None,
                "started_unix_nano": str(self._started_ns),
                "finished": finished,
                "error": failure._asdict() if failure is not None else None,
                "spans": self.stats(),
            }
        )


def _torch_versions() -> dict[str, str]:
    """Return the versions of torch and CUDA, by attribute."""
    versions = {names.TORCH_VERSION: str(torch.__version__)}
    if torch.version.cuda is not None:
        versions[names.CUDA_VERSION] = torch.version.cuda
    return versions
