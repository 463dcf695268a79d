"""Metrics on a port of our own, with a file that says where."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

from torchotel import _names as names
from torchotel._errors import ConfigError
from torchotel._utils.distributed import own_port
from torchotel._utils.faults import Guard
from torchotel.config.otlp_endpoint import is_loopback
from torchotel.exporters.outlets import MetricsOutlet
from torchotel.exporters.prometheus.discovery import DiscoveryFile, job_of
from torchotel.exporters.prometheus.exposition import Exposition
from torchotel.exporters.prometheus.listener import Listener
from torchotel.metrics.store import Metrics
from torchotel.tracing.span import Attributes

_TAKEN = {errno.EADDRINUSE, errno.EACCES, errno.EPERM}

_logger = logging.getLogger("torchotel")


class EndpointOutlet(MetricsOutlet):
    """A scrape endpoint and its target file.

    Args:
        host: Address that is listened on.
        port: Of the first local rank, the next rank's is one higher. 0: any free one; also taken if the port is in use.
        metrics: What is shown.
        resource: Attributes of the resource.
        folder: Where the target file goes; None: there is none.
        guard: Takes what goes wrong in a scrape.
        rest: Called between slices of an answer, to let go of the GIL.
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
        rest: Callable[[], None],
        *,
        wait: bool,
    ) -> None:
        self._host, self._first_port, self._resource = host, port, resource
        self._file = _open(folder, job_of(resource))
        self._write = guard.guarded(Exposition(metrics, resource, rest).write)
        self._listener: Listener | None = None
        self._ended = False
        if not wait:
            self._begin()

    @property
    def port(self) -> int | None:
        """The port that is really bound; None before and after."""
        listener = self._listener
        return None if listener is None else listener.port

    def prepare(self) -> None:
        """Load what answers who scrapes, and answer those who wait.

        Loaded also where the port waits for the first step: that may come at the interpreter's end, where it would be
        too late for the exit code (see `RequestExporter.prepare`).
        """
        from torchotel.exporters.prometheus import server  # noqa: F401, PLC0415  # what is slow to load

        listener = self._listener
        if listener is None:
            return
        try:
            listener.serve(self._write)
        except Exception:
            self._close()
            raise

    def first_step(self) -> None:
        """Begin, where that had to wait."""
        if self._listener is None and not self._ended:
            try:
                self._begin()
            except ConfigError as error:
                _logger.warning("No scrape endpoint in this process: %s", error)
            self.prepare()

    def flush(self, deadline_s: float) -> bool:
        """Do nothing: a scrape reads the present state."""
        return True

    def shutdown(self, deadline_s: float) -> None:
        """Take the target back and close the port."""
        self._ended = True
        self._close()

    def leave_target(self) -> None:
        """Leave the target where it is: a run that died is seen by its target being down."""
        self._file = None

    def detach(self) -> None:
        """Close the copy of the port; the file is the parent's."""
        self._ended = True
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.detach()

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
