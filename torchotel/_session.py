"""A session: capture, worker and exporters, from `instrument()` to `shutdown()`."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch.utils.data import get_worker_info

from torchotel import _semconv as names
from torchotel._records import Alignment, Baggage, Error, Record, Recordable, SpanReference, StepRecord
from torchotel._types import ConfigError
from torchotel._utils.distributed import NOT_AGREED, Identity, agree_on_launch, identify, own_run, rank_folder_name
from torchotel._utils.faults import Guard, Warn
from torchotel._utils.process import is_child, script_name
from torchotel.capture.cuda import device_id
from torchotel.capture.flight_recorder import read_collectives
from torchotel.capture.recorder import Capture
from torchotel.capture.torch_internals import group_store, mesh_place
from torchotel.config.config import Config
from torchotel.exporters.base import ExportStats, TraceExporter
from torchotel.exporters.factory import load_endpoint
from torchotel.exporters.run_folder import check_folder
from torchotel.exporters.sdk.global_provider import find_provider, import_despite_limit, warn_of_late_provider
from torchotel.integrations.registry import Frameworks
from torchotel.sampling.detail import Detail, Overhead, sampling_interval
from torchotel.tracing.context import attach_proxy, current_baggage, current_span
from torchotel.tracing.ids import IdGenerator
from torchotel.tracing.resource import ProcessResource, describe_process
from torchotel.tracing.shared_trace import SharedTraces
from torchotel.worker.backend import Backend, RunEnd, SessionLinks, ThreadBackend
from torchotel.worker.deferred import DeferredBackend
from torchotel.worker.stats import CaptureStats, Stats, WorkerState
from torchotel.worker.status_page import PhaseWriter
from torchotel.worker.supervisor import CompanionBackend, needs_thread

NO_COMPANION = (
    "There is no companion process: %s. A thread of the training process builds and exports the spans and metrics. Set "
    "TORCHOTEL_WORKER=thread if that is wanted."
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
        # Absolute, since the program may change its working directory before the first record.
        self._config = config if config.record is None else replace(config, record=config.record.absolute())
        self._started_unix_ns = time.time_ns()
        import_despite_limit()
        self._guard = Guard("the session", limit=1000)
        self._printed_before = _last_printed()
        self._overhead, self._detail = Overhead(), Detail(config.detail)
        described = describe_process(config.service_name, script_name(), _torch_versions())
        self._identity_fixed, self._launch, self._device_id, self._mesh = False, NOT_AGREED, "", ""
        exports_spans = exporters is None and config.traces_exporter != "none"
        self._found_no_provider = exports_spans and find_provider(config.tracer_provider) is None
        self._resource = ProcessResource(described, self._identify)
        self._shared = SharedTraces(lambda: self._resource.identity)
        with ExitStack() as undo:  # closes what is open if a later part fails
            self._backend = self._make_backend(exporters, on_record, undo, defer_start=defer_start)
            self._start(model, undo)
            undo.pop_all()

    def _make_backend(
        self,
        exporters: Callable[[ExportStats], Sequence[TraceExporter]] | None,
        on_record: Callable[[Record], None] | None,
        undo: ExitStack,
        *,
        defer_start: bool,
    ) -> Backend:
        links = SessionLinks(
            model=lambda: self._capture.model,
            capture_stats=self._capture_stats,
            overhead_ratio=lambda: self._overhead.ratio,
            on_step=self._measure_overhead,
            read_collectives=partial(read_collectives, with_places=self._config.exception_text != "type"),
        )
        make_thread = partial(
            ThreadBackend,
            self._config,
            self._resource,
            _torch_versions(),
            links,
            exporters=exporters,
            on_record=on_record,
            may_record=lambda: get_worker_info() is None,
            defer_start=defer_start,
            started_unix_ns=self._started_unix_ns,
        )
        if self._config.worker == "thread" or exporters is not None:
            return make_thread(undo)
        if (reason := needs_thread(self._config)) is not None:
            if self._config.worker == "process":
                _logger.warning(NO_COMPANION, reason)
            return make_thread(undo)
        make_companion = partial(self._make_companion, make_thread, links)
        if not (defer_start or is_child()):
            return make_companion(undo)

        def make_late(undo: ExitStack, phase_log: PhaseWriter) -> Backend:
            with suppress(ConfigError):  # the thread warns of the part that cannot be used, and has the others
                # Streams may have been closed since, and a handler of SIGCHLD set.
                if get_worker_info() is None and needs_thread(self._config) is None:
                    return make_companion(undo, phase_log)
            return make_thread(undo)

        if self._config.record is not None and not is_child():
            check_folder(self._config.record / rank_folder_name(self._resource.identity))
        load_endpoint(self._config)
        id_source = IdGenerator(self._config.sampler, self._config.sampler_ratio)
        return DeferredBackend(make_late, id_source, self._capture_stats, self._begin)

    def _make_companion(
        self,
        make_thread: Callable[[ExitStack], Backend],
        links: SessionLinks,
        undo: ExitStack,
        phase_log: PhaseWriter | None = None,
    ) -> Backend:
        """Make the backend with a companion process; if that cannot be started, the one with a thread."""
        try:
            return CompanionBackend(
                self._config, self._resource, _torch_versions(), links, undo, self._started_unix_ns, phase_log
            )
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001  # else an unforeseen error would cost the recording
            _logger.warning(NO_COMPANION, f"it cannot be started ({error})")
            return make_thread(undo)

    def _start(self, model: torch.nn.Module | None, undo: ExitStack) -> None:
        config = self._config
        self._capture = Capture(
            self.hand_over,
            self._detail,
            shapes=config.shapes,
            exception_text=config.exception_text,
            gradient_norms=config.gradient_norms,
            user_span=current_span,
            baggage=current_baggage,
            start_span=self._start_span,
            make_current=attach_proxy,
            warn=Warn(),
            on_first=self._guard.guarded(self._begin),
            on_group=self._guard.guarded(self._join_group),
            phase_log=self._backend.phase_log,
        )
        guarded = self._capture.guard.guarded
        self.log, self.watch = guarded(self._capture.log), guarded(self._capture.watches.watch)
        self.name = guarded(self._capture.name)
        self.step_begins, self.step_ends = guarded(self._capture.step_begins), guarded(self._capture.step_ends)
        self.ask_detail = guarded(self._capture.ask_detail)
        self._frameworks = Frameworks(partial(self._capture.log, offered=True))
        _logger.addFilter(self._name_rank)
        undo.callback(_logger.removeFilter, self._name_rank)
        self._backend.start(undo)
        undo.callback(self._capture.uninstall)
        if model is not None:
            self._capture.register_model(model)
        self._capture.install()
        undo.callback(self._frameworks.uninstall)
        self._frameworks.install()

    @property
    def prometheus_port(self) -> int | None:
        """The port that the scrape endpoint is bound to; None without a scrape endpoint."""
        return self._backend.prometheus_port

    @property
    def companion_pid(self) -> int | None:
        """The id of the companion process; None without one."""
        return self._backend.companion_pid

    @property
    def record_folder(self) -> Path | None:
        """The folder that the run is recorded in; None if it is not recorded."""
        return self._backend.run_folder

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
        return self._backend.flush(timeout_s)

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
        self._backend.disable_after_fork()
        _logger.removeFilter(self._name_rank)

    def discard_empty(self) -> None:
        """Remove the run file after `stop` if it has no record."""
        self._backend.discard_run_file(only_empty=True)

    def discard(self) -> None:
        """Stop before the first record, and remove the run file."""
        self._end_capture(None)
        self._backend.discard()
        _logger.removeFilter(self._name_rank)

    def stop(self, timeout_s: float, *, finished: bool = True, error: BaseException | None = None) -> None:
        """Remove every hook, export the remaining records, end the threads, close ports and files.

        Args:
            timeout_s: How many seconds the whole stop may take.
            finished: Whether the run came to a normal end.
            error: The exception that ended the run, for the run file and the step that it interrupted.
        """
        deadline_s = time.monotonic() + timeout_s
        self._backend.stop(deadline_s, RunEnd(finished, self._end_capture(error)))
        _logger.removeFilter(self._name_rank)

    def _end_capture(self, error: BaseException | None) -> Error | None:
        """Remove every hook, and hand over the remaining records; return how an exception is recorded."""
        guarded = self._guard.guarded
        guarded(self._frameworks.uninstall)()
        guarded(self._capture.uninstall)()
        ended_with = guarded(self._capture.errors.read)(error)
        guarded(self._capture.end)(ended_with)
        return ended_with

    def stats(self) -> Stats:
        """Return the present counts."""
        return self._backend.stats()

    def worker_state(self) -> WorkerState | None:
        """Return the state of the worker as of the last `stats`; None if it has ended."""
        return self._backend.worker_state()

    def _capture_stats(self) -> CaptureStats:
        capture = self._capture
        optional = (
            capture.gradients,
            capture.collectives,
            capture.collectives.buckets,
            capture.watches,
            capture.memory,
            capture.rates,
            capture.device_marks,
        )
        guards = [self._guard, *(part.guard for part in (capture, *optional, self._frameworks))]
        return CaptureStats(
            capture.switch.calls_dropped,
            capture.switch.timestamps_dropped,
            sum(guard.faults for guard in guards),
        )

    def _identify(self) -> Identity:
        identity = identify(os.environ, self._config.run_id, own_run.current(), self._launch)
        return identity._replace(device_id=self._device_id, mesh=self._mesh)

    def _name_rank(self, message: logging.LogRecord) -> bool:
        """Put the rank before a message if there are several: their streams often end up in one."""
        if self._resource.identity.world_size != 1:
            message.msg = f"rank {self._resource.identity.rank}: {message.msg}"
        return True

    def _fix_identity(self) -> None:
        if not self._identity_fixed:
            self._identity_fixed = True
            own_run.use()
            self._agree()

    def _agree(self) -> None:
        """Agree on the launch and the run with the other ranks of the process group, if there is one."""
        self._launch = agree_on_launch(group_store(), self._identify().run_id)
        self._device_id, self._mesh = device_id(), mesh_place()
        self._resource.update()

    def _join_group(self) -> None:
        """Agree with the other ranks at the first step of a process group, which may be made after the first record.

        Then the id of the run stays: it was exported.
        """
        is_late, run_id = self._identity_fixed, self._launch.run_id
        self._fix_identity()
        if is_late:
            self._agree()
            self._launch = self._launch._replace(run_id=run_id)
            self._resource.update()
            self._backend.fix_identity()

    def _start_span(
        self,
        name: str,
        parent: SpanReference | None,
        start_ns: int,
        *,
        baggage: Baggage | None = None,
        alignment: Alignment | None = None,
    ) -> SpanReference:
        """Fix the ids of a span that the program asks for while it runs; see `StartSpan`."""
        if alignment is not None:
            self._fix_identity()
            name = self._shared.root_template("step", alignment).name
        trace_id = self._shared.trace_id(alignment)
        return self._backend.id_source.start(name, parent, start_ns, baggage=baggage, trace_id=trace_id)

    def _begin(self) -> None:
        """Find the final identity with the first step, on the training thread: the process group exists by then."""
        self._fix_identity()
        if self._found_no_provider:
            warn_of_late_provider()
        self._backend.fix_identity()

    def hand_over(self, record: Recordable) -> None:
        """Hand a record to the worker."""
        if hasattr(sys, "ps1"):  # an interactive session has gone on after an exception
            self._printed_before = _last_printed()
        self._backend.append(record)

    def has_ended_with(self, error: BaseException) -> bool:
        """Return whether an exception that Python has printed was raised after the last record."""
        return id(error) != self._printed_before

    def _measure_overhead(self, step: StepRecord, worker_ns: int) -> None:
        """Measure the overhead of detail, and set the interval of detailed steps."""
        self._overhead.add(step, worker_ns)
        slowdown = self._overhead.upper_bound
        if self._detail.steered and step.detailed and slowdown is not None:
            self._detail.every = sampling_interval(self._config.overhead_budget, slowdown, self._detail.every)


def _last_printed() -> int:
    """Return the id of the exception that Python printed last; a reference would keep the tensors of its frames."""
    return id(getattr(sys, "last_value", None))


def _torch_versions() -> dict[str, str]:
    """Return the versions of torch and CUDA, by attribute."""
    versions = {names.TORCH_VERSION: str(torch.__version__)}
    if torch.version.cuda is not None:
        versions[names.CUDA_VERSION] = torch.version.cuda
    return versions
