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

from torchotel._records import Log, Record, StepRecord
from torchotel._types import ConfigError
from torchotel._utils.distributed import Identity, identify, own_run
from torchotel._utils.faults import Guard, Warn
from torchotel._utils.gil import GilYielder
from torchotel._utils.process import is_child
from torchotel._utils.version import package_version
from torchotel.capture.recorder import Capture
from torchotel.capture.runtime_info import script_name, versions
from torchotel.config.config import Config
from torchotel.exporters.base import ExportStats
from torchotel.exporters.factory import MetricExporters, make_exporters, open_record, rest
from torchotel.exporters.sdk.global_provider import import_despite_limit
from torchotel.integrations.registry import Frameworks
from torchotel.metrics.store import Metrics
from torchotel.sampling.detail import Detail, Overhead, sampling_interval
from torchotel.tracing.context import current_baggage, current_span, make_current
from torchotel.tracing.ids import IdGenerator, run_reference, run_trace
from torchotel.tracing.resource import ProcessResource, describe_process
from torchotel.tracing.span import SpanContextSource, Trace, TraceExporter
from torchotel.tracing.span_templates import Templates
from torchotel.tracing.trace_builder import TraceBuilder
from torchotel.worker.buffer import Buffer
from torchotel.worker.pipeline import Pipeline
from torchotel.worker.thread import Worker


class Stats(TypedDict):
    """Counts since `instrument()`."""

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
    """Moments of backwards beyond what is kept of one step, as where one graph runs backward very many times."""
    internal_errors: int
    """Errors of our own, which never reach the program."""
    overhead_ratio: float | None
    """Share of step time that detail costs; None until steps with and without were seen."""


def no_stats() -> Stats:
    """Return what is said where nothing runs."""
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
    """One run of capture, worker and exporters, from its first hook to its last byte.

    Args:
        config: What is wanted.
        model: Its modules get their full names from the first call on.
        exporters: Makes what traces go to, instead of where the configuration says.
        on_record: Gets each record, on the worker.
        wait: Open ports and push metrics only when there is something to tell: this process may be a launcher.

    Raises:
        ConfigError: A folder or an address can't be used; nothing was installed.
    """

    def __init__(
        self,
        config: Config,
        model: torch.nn.Module | None,
        exporters: Callable[[ExportStats], Sequence[TraceExporter]] | None = None,
        *,
        on_record: Callable[[Record], None] | None = None,
        wait: bool = False,
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
            sliced=GilYielder(rest),
        )
        self._stats = ExportStats(self._guard.guarded(self._metrics.exported))
        described = describe_process(config.service_name, script_name(), versions())
        self._settled = False
        self._resource = ProcessResource(described, self._identify)
        self._started_ns = time.time_ns()
        # In a child of multiprocessing the folder waits for a record: the child may be a DataLoader's worker.
        self._records_late = exporters is None and is_child()
        opens = exporters is None and not self._records_late
        self._record = open_record(config, self._resource, self._stats) if opens else None
        with ExitStack() as undo:  # of what is open by then, where the rest can't be had
            undo.callback(self._discard_record)
            made = None if exporters is None else exporters(self._stats)
            self._build(model, made, on_record, undo, wait=wait)
            undo.pop_all()

    def _build(
        self,
        model: torch.nn.Module | None,
        exporters: Sequence[TraceExporter] | None,
        on_record: Callable[[Record], None] | None,
        undo: ExitStack,
        *,
        wait: bool,
    ) -> None:
        config = self._config
        if exporters is None:
            exporters = make_exporters(config, self._resource, self._stats, self._record, self._guard)
        self._exporters = list(exporters)
        starters = [
            exporter for exporter in self._exporters if isinstance(exporter, SpanContextSource)
        ]  # the user's provider
        self._starter = starters[0] if starters else IdGenerator(config.sampler, config.sampler_ratio)
        buffer, self._warn = Buffer(), Warn()
        worker_guard = Guard("the worker", limit=1000)
        self._pipeline = self._make_pipeline(worker_guard)
        self._worker = Worker(
            buffer, self._exporters, self._pipeline, on_record=on_record, guard=worker_guard, warn=self._warn
        )
        self._capture = Capture(
            buffer.put,
            self._detail,
            shapes=config.shapes,
            exception_text=config.exception_text,
            gradient_norms=config.gradient_norms,
            user_span=current_span,
            baggage=current_baggage,
            start_span=self._starter.start,
            make_current=make_current,
            context=get_current,
            warn=self._warn,
            on_first=self._guard.guarded(self._settle_identity),
        )
        guarded = self._capture.guard.guarded
        self.log, self.watch = guarded(self._capture.log), guarded(self._capture.watches.watch)
        self.name = guarded(self._capture.name)
        self.step_begins, self.step_ends = guarded(self._capture.step_begins), guarded(self._capture.step_ends)
        self.ask_detail = guarded(self._capture.ask_detail)
        self._frameworks = Frameworks(partial(self._capture.log, offered=True))
        self._publisher = MetricExporters(
            config,
            self._metrics,
            self._resource,
            package_version(),
            self._stats,
            os.environ,
            rest,
            wait=wait or is_child(),
        )
        undo.callback(lambda: self._publisher.shutdown(time.monotonic(), finished=False))
        self._describe(finished=False)
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
        """The port of the scrape endpoint that is really bound, or None."""
        return self._publisher.port

    @property
    def record_folder(self) -> Path | None:
        """The folder that the run is recorded in, or None."""
        return None if self._record is None else self._record.folder

    @property
    def began(self) -> bool:
        """Whether anything has been seen of a step or an evaluation."""
        return any(thread.step_detector.in_step for thread in self._capture.threads.all) or any(
            self._capture.output.numbers.values()
        )

    def learn(self, model: torch.nn.Module) -> None:
        """Name the modules of a model before its first call."""
        self._capture.register_model(model)

    def flush(self, timeout_s: float) -> bool:
        """Bring out what has ended; False where it could not be in time."""
        self._guard.guarded(self._capture.flush)()
        deadline_s = time.monotonic() + timeout_s
        complete = self._worker.flush(timeout_s)
        return self._publisher.flush(deadline_s) and complete

    def pause(self) -> None:
        """Take every hook out, and hand over what there is."""
        self._guard.guarded(self._capture.pause)()

    def resume(self) -> None:
        """Put them back."""
        self._guard.guarded(self._capture.resume)()

    def detach(self) -> None:
        """Take every hook out, without a word to anybody: this is a forked child, which has no worker."""
        self._frameworks.uninstall()
        self._capture.detach()
        self._publisher.detach()

    def discard_empty(self) -> None:
        """Take the run file of what has stopped back, if nothing is in it."""
        if self._record is not None and self._record.empty:
            self._record.discard()

    def discard(self) -> None:
        """End before anything was seen, and leave no run file behind."""
        self.stop(0, finished=False)
        self._discard_record()

    def stop(self, timeout_s: float, *, finished: bool = True, error: BaseException | None = None) -> None:
        """Take every hook out, bring out what is left, end the threads, close ports and files.

        Args:
            timeout_s: For all of it.
            finished: Whether this is a normal end of the run.
            error: The exception that ended it, for the run file.
        """
        deadline_s, guarded = time.monotonic() + timeout_s, self._guard.guarded
        guarded(self._frameworks.uninstall)()
        guarded(self._capture.uninstall)()
        guarded(self._capture.end)()
        guarded(self._worker.stop)(deadline_s - time.monotonic())
        for exporter in self._exporters:  # the run file last: it says what became of the spans
            if exporter is self._record:
                guarded(self._describe)(finished=True, error=error)
            guarded(exporter.shutdown)(max(deadline_s, time.monotonic() + 0.1))
        # Last, since it says what became of the spans.
        guarded(self._publisher.shutdown)(max(deadline_s, time.monotonic() + 0.1), finished=finished)

    def stats(self) -> Stats:
        """Count spans, steps and errors."""
        counts = self._stats.read()
        capture = self._capture
        optional = (capture.gradients, capture.watches, capture.memory, capture.rates, capture.device_marks)
        parts = (capture, *optional, self._worker, self._publisher, self._frameworks)
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

    def _settle_identity(self) -> None:
        """Find the identity for good; called on the training thread, where the process group exists by now."""
        if not self._settled:
            self._settled = True
            own_run.use()
            self._resource.update()

    def _open_late_record(self) -> None:
        """Open a run file that waited for the first record."""
        if self._records_late and get_worker_info() is None:
            self._records_late = False
            try:
                self._record = open_record(self._config, self._resource, self._stats)
            except ConfigError as error:
                _logger.warning("This process is not recorded: %s", error)
            if self._record is not None:
                self._exporters.append(self._record)
                self._pipeline.record_to(self._record)

    def _make_pipeline(self, guard: Guard) -> Pipeline:
        config, sliced = self._config, GilYielder(rest)
        templates = Templates(config.include, config.exclude, config.max_depth)
        self._builder = TraceBuilder(templates, config.max_spans, sliced)
        return Pipeline(
            self._builder,
            self._exporters,
            self._starter,
            self._metrics,
            sliced,
            on_step=self._weigh,
            on_line=None if self._record is None else self._record.step,
            on_first=self._first,
            guard=guard,
            warn=self._warn,
        )

    def _outcomes(self) -> dict[str, int]:
        """Count spans by what became of them; what the buffer lost never came to an exporter."""
        counts = self._stats.read()
        return {
            "exported": counts.exported,
            "dropped_queue": counts.dropped_queue + self._worker.spans_dropped,
            "dropped_export": counts.dropped - counts.dropped_queue,
            "sampled_out": counts.sampled_out + self._worker.spans_sampled_out,
        }

    def _first(self, record: Record) -> Trace | None:
        """Do what waited for the first record of a kind; return the trace of the run before the first step."""
        self._open_late_record()
        if isinstance(record, Log):
            return None
        unit = record
        if unit.kind == "step" or not is_child():  # a loader's worker may evaluate, too
            self._publisher.begin()
        if unit.kind != "step":
            return None
        self._describe(finished=False)
        identity = self._resource.identity
        run = run_reference(identity.run_id, identity.generation)
        self._builder.link_steps_to(run)
        if identity.rank != 0:
            return None  # its ids are the same on all ranks
        time_ns = unit.start_ns + unit.unix_offset_ns
        return run_trace(run, time_ns, self._capture.model, self._config.public(), versions())

    def _weigh(self, step: StepRecord, worked_ns: int) -> None:
        """Measure what detail costs, and steer how often a step has it."""
        self._overhead.add(step, worked_ns)
        longer = self._overhead.at_most
        if self._detail.steered and step.detailed and longer is not None:
            self._detail.every = sampling_interval(self._config.overhead_budget, longer, self._detail.every)

    def _describe(self, *, finished: bool, error: BaseException | None = None) -> None:
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
