"""The stack as plain processes: the configurations in `deploy/`, run by the binaries of `backends`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from torchotel.stack import backends, places, written
from torchotel.stack.pages import shows_page
from torchotel.stack.process import Process
from torchotel.stack.servers import Ports, Server

_BACKENDS = {"jaeger": backends.JAEGER, "prometheus": backends.PROMETHEUS, "collector": backends.COLLECTOR}
FLAGS = (
    "--storage.tsdb.retention.time=15d",
    "--storage.tsdb.retention.size=20GB",
    "--enable-feature=exemplar-storage",
    "--web.enable-otlp-receiver",
)
"""Prometheus's, as in compose.yaml."""


def binaries(servers: list[Server], say: Callable[[str], None]) -> dict[str, Path]:
    """Find the servers' binaries, or build them."""
    backends.check_can_build(_BACKENDS[server.name] for server in servers)
    return {server.name: backends.ensure(_BACKENDS[server.name], say) for server in servers}


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
    return places.state() / "native" / name


def _arguments(name: str, ports: Ports, targets: str, *, small: bool) -> list[str]:
    if name == "prometheus":
        return prometheus_arguments(_folder(name), Path(targets), ports, small=small)
    return [f"--config={places.shipped() / name / f'{name}.yaml'}"]


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
    shutil.copy(places.shipped() / "prometheus" / "prometheus.yml", folder)
    shutil.rmtree(folder / "rules", ignore_errors=True)
    shutil.copytree(places.shipped() / "prometheus" / "rules", folder / "rules")
    (folder / "targets").unlink(missing_ok=True)
    (folder / "targets").symlink_to(targets)
    (folder / "collector.json").write_text(written.collector_targets(ports, small=small))
    return [
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{ports.prometheus}",
        *FLAGS,
    ]
