"""Run the stack as plain processes, with the configurations in `deploy/`."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from torchotel.stack import binaries, paths
from torchotel.stack.services import Ports, Server, serves_web_ui

_STOP_S = 30.0
"""Seconds for a server to end, which includes writing its data."""
_POLL_S = 0.05
_TAIL_BYTES = 4000


class Process:
    """A server process in its own session, with a folder for its pid file, its log and the previous log.

    The process holds a lock on its pid file until it ends: a pid alone may have been reused by another process.

    Args:
        folder: Folder of the files, which is created if it is missing.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._pid, self.log = folder / "pid", folder / "log"

    @property
    def pid(self) -> int | None:
        """The process id; None if the process is not running."""
        with self._pid.open("a+b") as file:
            if _lock(file, fcntl.LOCK_SH):  # shared, so that several commands can check at once
                return None
            file.seek(0)
            return int(file.read() or 0) or None

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start the process, unless it is running."""
        with self._pid.open("a+b") as file:
            while not _lock(file, fcntl.LOCK_EX):
                if not _lock(file, fcntl.LOCK_SH):
                    return
                fcntl.flock(file, fcntl.LOCK_UN)
                time.sleep(_POLL_S)  # another command holds the shared lock while it reads the pid
            if self.log.exists():
                self.log.replace(self.log.with_name("log.1"))  # the log of a process that failed is kept
            file.truncate(0)  # removes the previous process id
            with self.log.open("wb") as log:
                started = subprocess.Popen(  # noqa: S603 - a server's binary and its arguments
                    command,
                    env=dict(environ),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # so that Ctrl-C in this terminal does not reach it
                    pass_fds=[file.fileno()],  # the process inherits the lock
                )
            file.write(str(started.pid).encode())
            file.flush()
            started.returncode = 0  # prevents Popen's warning about a process that is still running

    def stop(self) -> None:
        """Terminate the process and wait until it has ended; after 30 s it is killed."""
        pid = self.pid
        for number, timeout_s in ((signal.SIGTERM, _STOP_S), (signal.SIGKILL, _STOP_S)):
            deadline_s = time.monotonic() + timeout_s
            if pid is None:
                return
            with suppress(ProcessLookupError):
                os.kill(pid, number)
            while self.pid is not None and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
            pid = self.pid

    def log_tail(self) -> str | None:
        """Return the end of the log of a process that has ended; None if it is running."""
        if self.pid is not None:
            return None
        return self.log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace") if self.log.exists() else ""


def _lock(file: BinaryIO, kind: int) -> bool:
    """Lock a file; return False if another process holds the lock."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


_BACKENDS = {"jaeger": binaries.JAEGER, "prometheus": binaries.PROMETHEUS, "collector": binaries.COLLECTOR}
FLAGS = (
    "--storage.tsdb.retention.time=15d",
    "--storage.tsdb.retention.size=20GB",
    "--enable-feature=exemplar-storage",
    "--web.enable-otlp-receiver",
)
"""Prometheus's arguments, as in compose.yaml."""


def find_binaries(servers: list[Server]) -> dict[str, Path]:
    """Return the servers' binaries, from the cache or from PATH.

    Raises:
        StackError: Binaries are missing.
    """
    binaries_by_backend = binaries.find_all(_BACKENDS[server.name] for server in servers)
    return {server.name: binaries_by_backend[_BACKENDS[server.name]] for server in servers}


def start(binaries: Mapping[str, Path], ports: Ports, targets: str, *, small: bool) -> None:
    """Start the processes that are not running."""
    environ = _environ(ports, small=small)
    for name, binary in binaries.items():
        _process(name).start([str(binary), *_arguments(name, ports, targets, small=small)], environ)


def stop(except_for: Collection[str] = ()) -> None:
    """Stop all processes but some; the Collector first, so that Jaeger receives its remaining spans."""
    for name in reversed(_BACKENDS):
        if name not in except_for:
            _process(name).stop()


def pids(servers: list[Server]) -> dict[str, int]:
    """Return the process ids of the servers that are running."""
    all_pids = {server.name: _process(server.name).pid for server in servers}
    return {name: pid for name, pid in all_pids.items() if pid is not None}


def without_web_ui(servers: list[Server]) -> dict[str, str]:
    """Return advice for servers that lack their web pages, by server."""
    return {
        server.name: _BACKENDS[server.name].advice
        for server in servers
        if server.has_web_ui and not serves_web_ui(server)
    }


def log(server: Server) -> Path:
    """Return the path of a server's log."""
    return _process(server.name).log


def log_tail(server: Server) -> str | None:
    """Return the end of the log of a server that has ended; None if it is running."""
    return _process(server.name).log_tail()


def _process(name: str) -> Process:
    return Process(_folder(name))


def _folder(name: str) -> Path:
    return paths.state() / "native" / name


def _arguments(name: str, ports: Ports, targets: str, *, small: bool) -> list[str]:
    if name == "prometheus":
        return prometheus_arguments(_folder(name), Path(targets), ports, small=small)
    return [f"--config={paths.shipped() / name / f'{name}.yaml'}"]


def _environ(ports: Ports, *, small: bool) -> dict[str, str]:
    """Return the environment of the servers, with the settings that differ from containers."""
    variables = {
        **ports.variables(),
        "JAEGER_LISTEN_HOST": "127.0.0.1",
        "COLLECTOR_LISTEN_HOST": "127.0.0.1",
        "JAEGER_OTLP_ENDPOINT": f"127.0.0.1:{ports.jaeger_otlp_grpc}",
        "JAEGER_UI_CONFIG": "",  # its links lead to Grafana, which a native stack does not have
        "JAEGER_STORAGE": str(_folder("jaeger") / "data"),
        "COLLECTOR_STORAGE": str(_folder("collector") / "data"),
    }
    if small:
        variables |= {"JAEGER_OTLP_GRPC_PORT": str(ports.otlp_grpc), "JAEGER_OTLP_HTTP_PORT": str(ports.otlp_http)}
    # OTEL_* variables configure the training, not the servers.
    return {**{name: text for name, text in os.environ.items() if not name.startswith("OTEL_")}, **variables}


def prometheus_arguments(folder: Path, targets: Path, ports: Ports, *, small: bool) -> list[str]:
    """Prepare a folder with Prometheus's configuration; return its arguments.

    Args:
        folder: Folder of the configuration, which is overwritten, and of the data.
        targets: Folder with the scrape endpoints of ranks.
        ports: Ports of Prometheus and of the Collector.
        small: Whether the stack has no Collector.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(paths.shipped() / "prometheus" / "prometheus.yml", folder)
    shutil.rmtree(folder / "rules", ignore_errors=True)
    shutil.copytree(paths.shipped() / "prometheus" / "rules", folder / "rules")
    (folder / "targets").unlink(missing_ok=True)
    (folder / "targets").symlink_to(targets)
    (folder / "collector.json").write_text(paths.collector_targets(ports, small=small))
    return [
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{ports.prometheus}",
        *FLAGS,
    ]
