"""Run the stack as plain processes with the configurations in `deploy/`."""

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
from torchotel.stack.services import Ports, Server, shows_page

_STOP_S = 30.0
"""For writing down what is in memory."""
_EVERY_S = 0.05
_TAIL_BYTES = 4000


class Process:
    """A server that runs on its own, with its log, the log before and the file of its pid in a folder.

    It holds a lock on that file for as long as it lives, however it ends: a pid alone may be another's by now.

    Args:
        folder: Made where it is not there.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._pid, self.log = folder / "pid", folder / "log"

    @property
    def pid(self) -> int | None:
        """The process that runs; None where none does."""
        with self._pid.open("a+b") as file:
            if _lock(file, fcntl.LOCK_SH):  # several may ask at once
                return None
            file.seek(0)
            return int(file.read() or 0) or None

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start it; does nothing where it runs."""
        with self._pid.open("a+b") as file:
            while not _lock(file, fcntl.LOCK_EX):
                if not _lock(file, fcntl.LOCK_SH):
                    return
                fcntl.flock(file, fcntl.LOCK_UN)
                time.sleep(_EVERY_S)  # somebody asked for the pid, and is done in a moment
            if self.log.exists():
                self.log.replace(self.log.with_name("log.1"))  # it may say why the last one ended
            file.truncate(0)  # nobody may take it for this one's
            with self.log.open("wb") as log:
                started = subprocess.Popen(  # noqa: S603 - the caller says what is run
                    command,
                    env=dict(environ),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # a Ctrl-C in this terminal is not meant for it
                    pass_fds=[file.fileno()],  # the lock goes with it
                )
            file.write(str(started.pid).encode())
            file.flush()
            started.returncode = 0  # it is not ours to wait for; Popen would warn of it

    def stop(self) -> None:
        """End it and wait until it has ended."""
        pid = self.pid
        for number, patience_s in ((signal.SIGTERM, _STOP_S), (signal.SIGKILL, _STOP_S)):
            deadline_s = time.monotonic() + patience_s
            if pid is None:
                return
            with suppress(ProcessLookupError):
                os.kill(pid, number)
            while self.pid is not None and time.monotonic() < deadline_s:
                time.sleep(_EVERY_S)
            pid = self.pid

    def last_words(self) -> str | None:
        """Give the end of the log of a process that has ended; None while it runs."""
        if self.pid is not None:
            return None
        return self.log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace") if self.log.exists() else ""


def _lock(file: BinaryIO, kind: int) -> bool:
    """Lock a file, or tell that another process has it."""
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
"""Prometheus's, as in compose.yaml."""


def find_binaries(servers: list[Server]) -> dict[str, Path]:
    """Find the servers' binaries in the cache or on PATH.

    Raises:
        StackError: Binaries are missing.
    """
    found = binaries.find_all(_BACKENDS[server.name] for server in servers)
    return {server.name: found[_BACKENDS[server.name]] for server in servers}


def start(binaries: Mapping[str, Path], ports: Ports, targets: str, *, small: bool) -> None:
    """Start what does not run."""
    environ = _environ(ports, small=small)
    for name, binary in binaries.items():
        _process(name).start([str(binary), *_arguments(name, ports, targets, small=small)], environ)


def stop(but: Collection[str] = ()) -> None:
    """Stop all but some, the Collector first: what it holds still goes to Jaeger."""
    for name in reversed(_BACKENDS):
        if name not in but:
            _process(name).stop()


def pids(servers: list[Server]) -> dict[str, int]:
    """Give the processes of the servers that run."""
    asked = {server.name: _process(server.name).pid for server in servers}
    return {name: pid for name, pid in asked.items() if pid is not None}


def pageless(servers: list[Server]) -> dict[str, str]:
    """Name the servers that should show pages and have none, and say where a release that has them goes."""
    return {
        server.name: _BACKENDS[server.name].advice for server in servers if server.has_page and not shows_page(server)
    }


def log(server: Server) -> Path:
    """Give the path of a server's log."""
    return _process(server.name).log


def last_words(server: Server) -> str | None:
    """Give the end of the log of a server that has ended."""
    return _process(server.name).last_words()


def _process(name: str) -> Process:
    return Process(_folder(name))


def _folder(name: str) -> Path:
    return paths.state() / "native" / name


def _arguments(name: str, ports: Ports, targets: str, *, small: bool) -> list[str]:
    if name == "prometheus":
        return prometheus_arguments(_folder(name), Path(targets), ports, small=small)
    return [f"--config={paths.shipped() / name / f'{name}.yaml'}"]


def _environ(ports: Ports, *, small: bool) -> dict[str, str]:
    """Say to the configurations what differs from a container."""
    chosen = {
        **ports.variables(),
        "JAEGER_LISTEN_HOST": "127.0.0.1",
        "COLLECTOR_LISTEN_HOST": "127.0.0.1",
        "JAEGER_OTLP_ENDPOINT": f"127.0.0.1:{ports.jaeger_otlp_grpc}",
        "JAEGER_UI_CONFIG": "",  # its links lead to Grafana, which is not among them
        "JAEGER_STORAGE": str(_folder("jaeger") / "data"),
        "COLLECTOR_STORAGE": str(_folder("collector") / "data"),
    }
    if small:
        chosen |= {"JAEGER_OTLP_GRPC_PORT": str(ports.otlp_grpc), "JAEGER_OTLP_HTTP_PORT": str(ports.otlp_http)}
    # What OTEL_* says is meant for the training.
    return {**{name: text for name, text in os.environ.items() if not name.startswith("OTEL_")}, **chosen}


def prometheus_arguments(folder: Path, targets: Path, ports: Ports, *, small: bool) -> list[str]:
    """Lay out a folder as Prometheus's container has it, and give the arguments to run it there.

    Args:
        folder: For its configuration, which is written anew, and its data.
        targets: Where ranks name their endpoints.
        ports: Where it and the Collector listen.
        small: There is no Collector.
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
