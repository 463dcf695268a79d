"""The only file that knows all: what `instrument()` starts, and how it ends."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from torchotel import _names as names
from torchotel._buffer import Buffer
from torchotel._config import Config
from torchotel._records import Unit
from torchotel._worker import Worker
from torchotel.capture.capture import Capture
from torchotel.capture.detail import Detail
from torchotel.exporters.otlp.exporter import OtlpTraceExporter
from torchotel.exporters.runfile import RunFile
from torchotel.exporters.stats import ExportStats
from torchotel.telemetry.calls import Templates
from torchotel.telemetry.context import current_span
from torchotel.telemetry.resource import describe_process
from torchotel.telemetry.run import find_run_id, run_reference, run_trace
from torchotel.telemetry.spans import Trace, TraceExporter
from torchotel.telemetry.traces import TraceBuilder

SHUTDOWN_S = 10.0
REST_S = 0.0002  # the longest gap that the worker makes in the training thread is one slice of spans

_logger = logging.getLogger("torchotel")


class Handle:
    """What runs from `instrument()` to `shutdown()`; also a context manager that shuts down at its end."""

    def __init__(
        self, config: Config, model: torch.nn.Module | None, exporters: list[TraceExporter] | None = None
    ) -> None:
        self.config = config
        self._closed = not _may_run(config)
        self._lock = threading.Lock()
        self._stats = ExportStats()
        self._record: RunFile | None = None
        self._capture: Capture | None = None
        if self._closed:
            return
        self._run_id = find_run_id(config.run_id, os.environ)
        self._resource = describe_process(config.service_name or _script_name(), self._run_id, os.environ, _versions())
        self._started_ns = time.time_ns()
        self._exporters = self._make_exporters() if exporters is None else exporters
        reference = run_reference(self._run_id, int(str(self._resource[names.RUN_GENERATION])))
        self._run = reference
        templates = Templates(config.include, config.exclude, config.max_depth)
        buffer = Buffer()
        self._worker = Worker(
            buffer,
            TraceBuilder(templates, config.max_spans, reference),
            self._exporters,
            self._write_step,
            self._first_step,
        )
        self._capture = Capture(buffer.put, Detail(config.detail), shapes=config.shapes, user_span=current_span)
        self._describe(finished=False)
        self._worker.start()
        if model is not None:
            self._capture.learn(model)
        self._capture.install()
        atexit.register(self.shutdown)
        os.register_at_fork(after_in_child=self._forked)

    def flush(self, timeout_s: float = 10) -> bool:
        """Export all that ended on this thread and all that other threads handed over.

        Returns:
            False where it could not be exported within `timeout_s` seconds.
        """
        if self._closed or self._capture is None:
            return True
        self._capture.flush()
        return self._worker.flush(timeout_s)

    def shutdown(self, timeout_s: float = SHUTDOWN_S) -> None:
        """Flush, remove every hook, stop the threads, close files; a second call does nothing."""
        _forget(self)
        with self._lock:
            if self._closed or self._capture is None:
                return
            self._closed = True
        self._capture.uninstall()
        self._capture.end()
        deadline_s = time.monotonic() + timeout_s
        self._worker.stop(timeout_s)
        for exporter in reversed(self._exporters):  # the run file last: it says what became of the spans
            if exporter is self._record:
                self._describe(finished=True)
            exporter.shutdown(max(deadline_s, time.monotonic() + 0.1))
        atexit.unregister(self.shutdown)

    def stats(self) -> dict[str, object]:
        """Return counts: `spans_recorded` is `spans_exported + spans_dropped + spans_sampled_out`, once flushed."""
        counts = self._stats.read()
        worker = None if self._capture is None else self._worker
        return {
            "spans_recorded": worker.spans_recorded if worker else 0,
            "spans_exported": counts.exported,
            "spans_dropped": counts.dropped + (worker.spans_dropped if worker else 0),
            "spans_sampled_out": worker.spans_sampled_out if worker else 0,
            "export_errors": sum(counts.errors.values()),
            "steps": worker.counts["step"] if worker else 0,
            "evaluations": worker.counts["evaluation"] if worker else 0,
            "steps_detailed": worker.detailed if worker else 0,
            "calls_dropped": self._capture.calls_dropped if self._capture else 0,
            "internal_errors": self._capture.guard.faults if self._capture else 0,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    # ---- parts

    def _make_exporters(self) -> list[TraceExporter]:
        config = self.config
        exporters: list[TraceExporter] = []
        version = package_version()
        if config.record is not None:
            stats = self._stats if config.traces_exporter == "none" else ExportStats()
            self._record = RunFile(config.record, resource=self._resource, version=version, stats=stats, rest=_rest)
            exporters.append(self._record)
        if config.traces_exporter == "otlp":
            certificate = config.client_certificate
            pair = (certificate, config.client_key) if certificate and config.client_key else certificate
            exporters.append(
                OtlpTraceExporter(
                    config.traces_endpoint,
                    headers=config.headers,
                    compression=config.compression,
                    timeout_s=config.timeout_s,
                    verify=config.certificate or True,
                    cert=pair,
                    resource=self._resource,
                    version=version,
                    stats=self._stats,
                    rest=_rest,
                )
            )
        return exporters

    def _first_step(self, unit: Unit) -> Trace:
        self._describe(finished=False)
        assert self._capture is not None  # noqa: S101  # there is no step without capture
        return run_trace(
            self._run,
            unit.start_ns + unit.unix_offset_ns,
            self._capture.model,
            self.config.public(),
            _versions(),
        )

    def _write_step(self, summary: Mapping[str, object]) -> None:
        if self._record is not None:
            self._record.step(summary)

    def _describe(self, *, finished: bool) -> None:
        if self._record is None or self._capture is None:
            return
        model = self._capture.model
        self._record.describe(
            {
                "torchotel.version": package_version(),
                "run_id": self._run_id,
                "service_name": self._resource["service.name"],
                "config": self.config.public(),
                "resource": self._resource,
                "model": model._asdict() if model is not None else None,
                "started_unix_nano": str(self._started_ns),
                "finished": finished,
                "spans": self.stats(),
            }
        )

    def _forked(self) -> None:
        """Be off in a forked child: it has no worker, and a DataLoader's workers are not to be seen."""
        if not self._closed and self._capture is not None:
            self._closed = True
            self._capture.uninstall()
            _forget(self)


_current: Handle | None = None
_current_lock = threading.Lock()


def start(config: Config, model: torch.nn.Module | None) -> Handle:
    """Start what the configuration says, or return what runs already."""
    global _current  # noqa: PLW0603  # hooks are global to the process, so is what put them in
    with _current_lock:
        if _current is None:
            _current = Handle(config, model)
        elif _current.config != config:
            _logger.warning(
                "instrument() was called again with other settings; those of the first call stay. "
                "Call uninstrument() before, to change them."
            )
        return _current


def stop() -> None:
    """Shut down what runs, if anything does."""
    if _current is not None:
        _current.shutdown()


def _forget(handle: Handle) -> None:
    global _current  # noqa: PLW0603  # see start
    if _current is handle:
        _current = None


def package_version() -> str:
    """Return the version of torchotel that is installed."""
    try:
        return installed_version("torchotel")
    except PackageNotFoundError:  # a checkout on the path
        return "0.0.0"


def _may_run(config: Config) -> bool:
    return not config.disabled and torch.utils.data.get_worker_info() is None


def _versions() -> dict[str, str]:
    versions = {names.TORCH_VERSION: str(torch.__version__)}
    if torch.version.cuda is not None:
        versions[names.CUDA_VERSION] = torch.version.cuda
    return versions


def _script_name() -> str:
    return Path(sys.argv[0]).stem or "python" if sys.argv and sys.argv[0] not in {"", "-c"} else "python"


def _rest() -> None:
    time.sleep(REST_S)
