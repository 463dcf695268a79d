"""Serve metrics for Prometheus, and write the file by which it discovers this process."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import logging
import os
import socket
import stat
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
from torchotel.tracing.span import Attributes

WILDCARDS = {"0.0.0.0", "::", ""}  # noqa: S104  # compared with, not bound to
MAX_TARGET_BYTES = 64 * 1024
"""A larger file in the folder is not one that torchotel wrote, and is not read."""


class DiscoveryFile:
    """One target in a folder that Prometheus watches: `file_sd_configs: [{files: ["FOLDER/*.json"]}]`.

    That of a process which died is left there, so that Prometheus sees it down, until another one takes its port.

    Args:
        folder: Made where it is not there.
        job: What the series are labelled with, in place of the name of Prometheus's scrape job.

    Raises:
        OSError: The folder can't be made or written to.
    """

    def __init__(self, folder: Path, job: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied", os.fspath(folder))
        self._job = job
        # Several hosts may share the folder.
        self._host = f"torchotel-{socket.gethostname()}-"
        # Absolute, since the program may change its working directory.
        self.path = folder.absolute() / f"{self._host}{os.getpid()}.json"

    def write(self, host: str, port: int) -> None:
        """Name the target; Prometheus sees the whole file or none."""
        name = socket.gethostname() if host in WILDCARDS else host
        address = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
        new = self.path.with_name(f".{self.path.name}.new")
        # Other labels would collide with those of target_info.
        new.unlink(missing_ok=True)
        # Others may write to the folder as well: a link of theirs is not followed. Prometheus, which is another user,
        # has to read the file whatever the umask says; there is no more in it than an address and a name.
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "w") as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(json.dumps([{"targets": [address], "labels": {"job": self._job}}]) + "\n")
        new.replace(self.path)
        self._remove_dead(address)

    def remove(self) -> None:
        """Take the target back."""
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
    """Name the job as Prometheus names that of metrics which are pushed to it: the service, after its namespace."""
    names = (resource.get(f"service.{name}") for name in ("namespace", "name"))
    return otlp_safe_text("/".join(str(name) for name in names if name))


_TAKEN = {errno.EADDRINUSE, errno.EACCES, errno.EPERM}

_logger = logging.getLogger("torchotel")


class PrometheusMetricExporter(MetricExporter):
    """A scrape endpoint and its target file.

    Args:
        host: Address that is listened on.
        port: Of the first local rank, the next rank's is one higher. 0: any free one; also taken if the port is in use.
        metrics: What is shown.
        resource: Attributes of the resource.
        folder: Where the target file goes; None: there is none.
        guard: Takes what goes wrong in a scrape.
        wait: Begin with the first step only: this process may be a loader's worker.

    Raises:
        ConfigError: The address or the folder can't be used.
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
        wait: bool,
    ) -> None:
        self._host, self._first_port, self._resource = host, port, resource
        self._file = _open(folder, job_of(resource))
        self._guarded = guard.guarded
        self._write = guard.guarded(Exposition(metrics, resource).write)
        self._listener: Listener | None = None
        self._ended = False
        if not wait:
            self._begin()

    @property
    def port(self) -> int | None:
        """The port that is really bound; None before and after."""
        listener = self._listener
        return None if listener is None else listener.port

    def first_step(self) -> None:
        """Begin, where that had to wait."""
        if self._listener is None and not self._ended:
            try:
                self._begin()
            except ConfigError as error:
                _logger.warning("No scrape endpoint in this process: %s", error)

    def shutdown(self, deadline_s: float) -> None:
        """Take the target back and close the port."""
        self._ended = True
        self._close()

    def leave_target(self) -> None:
        """Leave the target where it is: a run that died is seen by its target being down."""
        self._file = None

    def disable_after_fork(self) -> None:
        """Close the copy of the port; the file is the parent's."""
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

    def _begin(self) -> None:
        listener = self._listen()
        if not is_loopback(self._host):
            _logger.warning(
                "Metrics are served on %s:%d to everybody who can reach it: names of modules and logged values are "
                "among them. Let a firewall stand before it, or take prometheus_host=127.0.0.1 "
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
            self._close()  # otherwise clients would wait for an answer
            raise

    def _listen(self) -> Listener:
        local_rank = self._resource.get(names.LOCAL_RANK)
        port = own_port(self._first_port, local_rank if isinstance(local_rank, int) else None)
        try:
            try:
                return Listener(self._host, port)
            except OSError as error:
                if error.errno not in _TAKEN or not port:
                    raise
            listener = Listener(self._host, 0)
        except (OSError, UnicodeError) as error:  # a name that is none can't even be encoded
            takes = f"an address of this machine that can be listened on ({error})"
            raise ConfigError("prometheus_host", self._host, takes) from error
        _logger.warning(
            "Port %d is taken; metrics are at http://%s:%d/metrics. Choose another with prometheus_port "
            "(OTEL_EXPORTER_PROMETHEUS_PORT); 0 takes any free one.",
            port,
            self._host,
            listener.port,
        )
        return listener


def _open(folder: Path | None, job: str) -> DiscoveryFile | None:
    if folder is None:
        return None
    try:
        return DiscoveryFile(folder, job)
    except OSError as error:
        raise _unusable(folder, error) from error


def _unusable(folder: Path | None, error: OSError) -> ConfigError:
    return ConfigError("discovery_dir", os.fspath(folder or ""), f"a folder that can be written to ({error.strerror})")
