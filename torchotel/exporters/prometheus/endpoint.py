"""Serve metrics for Prometheus, and write the file of its service discovery."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import logging
import os
import socket
import stat
import tempfile
from pathlib import Path
from typing import Any

from torchotel import _semconv as names
from torchotel._types import ConfigError
from torchotel._utils.distributed import own_port
from torchotel._utils.faults import Guard
from torchotel.config.otlp_endpoint import is_loopback
from torchotel.exporters.base import MetricExporter
from torchotel.exporters.prometheus.exposition import Exposition
from torchotel.exporters.prometheus.server import Listener
from torchotel.exporters.sanitize import otlp_safe_text
from torchotel.metrics.store import Metrics
from torchotel.tracing.span import Attributes, AttributeValue

WILDCARDS = {"0.0.0.0", "::", ""}  # noqa: S104  # compared with, not bound to
MAX_TARGET_BYTES = 64 * 1024
"""Largest file in the folder that is read; torchotel writes small files."""


class DiscoveryFile:
    """A target in a folder that Prometheus watches: `file_sd_configs: [{files: ["FOLDER/*.json"]}]`.

    The file of a crashed process remains, so that Prometheus sees it as down, until another process has its port.

    Args:
        folder: Created if missing.
        job: Label `job` of the series, which replaces the name of Prometheus's scrape job.
        pid: The training process, which may be another one.

    Raises:
        OSError: The folder cannot be created or written to.
    """

    def __init__(self, folder: Path, job: str, pid: AttributeValue) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied", os.fspath(folder))
        self._job = job
        # Several hosts may share the folder.
        self._host = f"torchotel-{socket.gethostname()}-"
        # Absolute, since the program may change its working directory.
        self.path = folder.absolute() / f"{self._host}{pid}.json"

    def write(self, host: str, port: int) -> None:
        """Write the target; Prometheus sees the whole file or none."""
        name = socket.gethostname() if host in WILDCARDS else host
        address = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
        # mkstemp follows no link that another user has put there. Its random name lets several sessions of a process
        # write at once. Prometheus, another user, must be able to read the file with any umask. Labels other than `job`
        # would collide with those of target_info.
        descriptor, new = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.path.parent)
        try:
            with os.fdopen(descriptor, "w") as file:
                os.fchmod(descriptor, 0o644)
                file.write(json.dumps([{"targets": [address], "labels": {"job": self._job}}]) + "\n")
            Path(new).replace(self.path)
        except OSError:
            Path(new).unlink()
            raise
        self._remove_dead(address)

    def remove(self) -> None:
        """Remove the target."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _remove_dead(self, address: str) -> None:
        """Remove target files that dead processes of this user and host left for the address of this process."""
        for other in self.path.parent.glob(f"{glob.escape(self._host)}*.json"):
            # Anyone may write to a shared folder, so any content is possible, such as JSON nested too deeply.
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
                if other != self.path and _read_own(other)[0]["targets"] == [address]:
                    other.unlink()


def _read_own(path: Path) -> Any:
    """Parse a target file of this user.

    Raises:
        OSError: The path is a link, cannot be opened, or is not a small regular file of this user.
        ValueError: The content is not JSON.
        RecursionError: The JSON is nested too deeply.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opening a pipe would block
    with os.fdopen(os.open(path, flags), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size > MAX_TARGET_BYTES:
            raise PermissionError(path)
        return json.loads(file.read(MAX_TARGET_BYTES))


def job_of(resource: Attributes) -> str:
    """Return the job as Prometheus names it for OTLP metrics: service.namespace/service.name."""
    names = (resource.get(f"service.{name}") for name in ("namespace", "name"))
    return otlp_safe_text("/".join(str(name) for name in names if name))


_TAKEN = {errno.EADDRINUSE, errno.EACCES, errno.EPERM}

_logger = logging.getLogger("torchotel")


class PrometheusMetricExporter(MetricExporter):
    """A scrape endpoint and its target file.

    Args:
        host: Address to listen on.
        port: Port of local rank 0; rank n has this port plus n. 0 or a port in use: any free port.
        metrics: Source of the metrics.
        resource: Attributes of the resource.
        folder: Folder of the target file; None: no target file.
        guard: Counts errors of a scrape.
        defer_start: Start with the first step or evaluation: this process may be a DataLoader's worker.
        listener: The port, if another process has opened it; None: it is opened.

    Raises:
        ConfigError: The address or the folder cannot be used.
    """

    def __init__(
        self,
        host: str,
        port: int,
        metrics: Metrics,
        resource: Attributes,
        folder: Path | None,
        guard: Guard,
        *,
        defer_start: bool,
        listener: Listener | None = None,
    ) -> None:
        self._inherited = listener
        self._host, self._first_port, self._resource = host, port, resource
        self._file = open_discovery(folder, resource)
        self._guarded = guard.guarded
        self._write = guard.guarded(Exposition(metrics, resource).write)
        self._listener: Listener | None = None
        self._ended = False
        if not defer_start:
            self._start()

    @property
    def port(self) -> int | None:
        """Return the bound port; None before the start and after the shutdown."""
        listener = self._listener
        return None if listener is None else listener.port

    def first_record(self) -> None:
        """Start if this was deferred."""
        if self._listener is None and not self._ended:
            try:
                self._start()
            except ConfigError as error:
                _logger.warning("No scrape endpoint in this process: %s", error)

    def shutdown(self, deadline_s: float) -> None:
        """Remove the target and close the port."""
        self._ended = True
        self._close()

    def keep_target(self) -> None:
        """Keep the target after the shutdown: a target that is down shows that the run has failed."""
        self._file = None

    def disable_after_fork(self) -> None:
        """Close the copy of the port; the target file belongs to the parent process."""
        self._ended = True
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.disable_after_fork()

    def _close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            if self._file is not None:
                self._file.remove()
            listener.close()

    def _start(self) -> None:
        local_rank = self._resource.get(names.LOCAL_RANK)
        listener = self._inherited or listen(self._host, self._first_port, local_rank)
        if not is_loopback(self._host):
            _logger.warning(
                "Metrics on %s:%d are readable by every host that can reach it, including names of modules and logged "
                "values. Restrict access with a firewall, or set prometheus_host=127.0.0.1 "
                "(OTEL_EXPORTER_PROMETHEUS_HOST).",
                self._host,
                listener.port,
            )
        try:
            if self._file is not None:
                self._file.write(self._host, listener.port)
        except OSError as error:
            listener.close()
            raise _unusable(self._file.path.parent if self._file else None, error) from error
        self._listener = listener
        self._guarded(self._serve)(listener)

    def _serve(self, listener: Listener) -> None:
        try:
            listener.serve(self._write)
        except Exception:
            self._close()  # otherwise clients wait for a response
            raise


def listen(host: str, first_port: int, local_rank: AttributeValue | None) -> Listener:
    """Open the port of a local rank; if it is taken, any free port.

    Args:
        host: Address to listen on.
        first_port: Port of local rank 0; rank n has this port plus n. 0: any free port.
        local_rank: The local rank, None if it is unknown.

    Raises:
        ConfigError: The address cannot be used.
    """
    port = own_port(first_port, local_rank if isinstance(local_rank, int) else None)
    try:
        try:
            return Listener.open(host, port)
        except OSError as error:
            if error.errno not in _TAKEN or not port:
                raise
        listener = Listener.open(host, 0)
    except (OSError, UnicodeError) as error:  # UnicodeError: the host cannot be encoded
        takes = f"an address of this machine that can be listened on ({error})"
        raise ConfigError("prometheus_host", host, takes) from error
    _logger.warning(
        "Port %d is taken; metrics are at http://%s:%d/metrics. Choose another with prometheus_port "
        "(OTEL_EXPORTER_PROMETHEUS_PORT); 0 takes any free one.",
        port,
        host,
        listener.port,
    )
    return listener


def open_discovery(folder: Path | None, resource: Attributes) -> DiscoveryFile | None:
    """Prepare the target file in a folder; None without a folder.

    Raises:
        ConfigError: The folder cannot be used.
    """
    if folder is None:
        return None
    try:
        return DiscoveryFile(folder, job_of(resource), resource.get("process.pid", os.getpid()))
    except OSError as error:
        raise _unusable(folder, error) from error


def _unusable(folder: Path | None, error: OSError) -> ConfigError:
    return ConfigError("discovery_dir", os.fspath(folder or ""), f"a folder that can be written to ({error.strerror})")
