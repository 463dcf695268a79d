"""Real servers on loopback, by the configurations that are shipped: started, stopped, killed, started where they were.

Each has a folder for its data and its log, and all of them share `Ports`, chosen anew by `own_ports()`.
"""

import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from support.ports import free_ports
from support.prometheus_server import until
from support.server_binaries import built
from torchotel.exporters.otlp.sender import RetryPolicy
from torchotel.stack import native
from torchotel.stack.native import Process
from torchotel.stack.paths import COLLECTOR, JAEGER, PROMETHEUS, shipped
from torchotel.stack.services import Ports, Server, servers, wait_until_healthy

PATIENCE_S = 60
GATEWAY = Path(__file__).parents[2] / "deploy" / "kubernetes" / "base" / "config" / "gateway.yaml"
OUTAGE_BOUNDS = {"retry": RetryPolicy(first_backoff_s=0.05, max_elapsed_s=0.5), "max_requests": 2}
"""What bounds how long and how many requests wait, by its parameter: small, since 64 s and 64 requests take minutes."""
IN_MEMORY = """
extensions:
  jaeger_storage: {backends: {memory: {memory: {max_traces: 10000}}}}
  jaeger_query: {storage: {traces: memory}}
exporters:
  jaeger_storage_exporter: {trace_storage: memory}
"""
"""Beside Jaeger's configuration: what is kept in memory is lost with the process."""


def own_ports() -> Ports:
    """Give ports that nobody listens on."""
    names = list(Ports.__dataclass_fields__)
    return Ports(**dict(zip(names, free_ports(len(names)), strict=True)))


class RealServer:
    """A server of the stack; starting it again finds the ports and the data of before.

    Args:
        name: As the stack has it.
        words: What is run.
        ports: Those of all servers.
        folder: For its log and its data, made where it is not there.
        listens: Ports that it listens on, if they are others than in the stack.
        environ: What its configuration reads from the environment.
    """

    def __init__(
        self,
        name: str,
        words: Sequence[object],
        ports: Ports,
        folder: Path,
        *,
        listens: Sequence[int] = (),
        **environ: object,
    ) -> None:
        self.ports, self.folder = ports, folder
        self._server: Server = next(one for one in servers(ports, small=False, native=True) if one.name == name)
        self._listens = listens or self._server.ports
        self._words = [str(word) for word in words]
        kept = {name: text for name, text in os.environ.items() if not name.startswith("OTEL_")}
        self._environ = {**kept, **ports.variables(), **{name: str(value) for name, value in environ.items()}}
        self._process = Process(folder)

    @property
    def pid(self) -> int | None:
        """The process; None while it does not run."""
        return self._process.pid

    @property
    def log(self) -> str:
        """What it has said since its last start."""
        return self._process.log.read_text()

    def start(self) -> None:
        """Start it and wait until it can be used."""
        self._process.start(self._words, self._environ)
        wait_until_healthy([self._server], PATIENCE_S, lambda _: self._process.log_tail())
        until(lambda: [_listens(port) for port in self._listens], all)  # some answer before their receivers do

    def stop(self) -> None:
        """Let it end in order, and wait until it has; nothing where it does not run."""
        self._process.stop()

    def kill(self) -> None:
        """End it at once, as a machine that goes away."""
        pid = self.pid
        assert pid is not None
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        until(lambda: self.pid, lambda pid: pid is None)


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@contextmanager
def running(server: RealServer) -> Iterator[RealServer]:
    """Have a server run in the block, stopped and started as the block likes."""
    try:
        server.start()
        yield server
    finally:
        server.stop()


def jaeger(folder: Path, ports: Ports, *, memory: bool = False) -> RealServer:
    """Make a Jaeger that takes OTLP at `jaeger_otlp_http` and `jaeger_otlp_grpc`, and answers at `jaeger`.

    Args:
        folder: For its data, which stay, and its log.
        ports: Where it listens.
        memory: Keep traces in memory, not in Badger.
    """
    folder.mkdir(parents=True, exist_ok=True)
    configs = [shipped() / "jaeger" / "jaeger.yaml"]
    if memory:
        configs.append(folder / "memory.yaml")
        configs[-1].write_text(IN_MEMORY)
    words = [built(JAEGER), *(f"--config={config}" for config in configs)]
    page = shipped() / "jaeger" / "ui.json"
    return RealServer("jaeger", words, ports, folder, JAEGER_STORAGE=folder / "data", JAEGER_UI_CONFIG=page)


def collector(folder: Path, ports: Ports) -> RealServer:
    """Make a Collector that takes OTLP at `otlp_http` and `otlp_grpc`, and passes traces on to Jaeger.

    Args:
        folder: For its queue, which stays, and its log.
        ports: Where it and Jaeger listen.
    """
    words = [built(COLLECTOR), f"--config={shipped() / 'collector' / 'collector.yaml'}"]
    return RealServer("collector", words, ports, folder, **_before_jaeger(folder, ports))


def gateway(folder: Path, ports: Ports, **environ: object) -> RealServer:
    """Make a Collector as Kubernetes has it before Jaeger: it takes OTLP at `otlp_grpc`, and passes on what is kept.

    Args:
        folder: For its queue, which stays, and its log.
        ports: Where it and Jaeger listen.
        environ: What else its configuration reads: how long it holds a trace, and the share of the rest.
    """
    words = [built(COLLECTOR), f"--config={GATEWAY}"]
    listens = (ports.otlp_grpc, ports.collector_health, ports.collector_telemetry)
    return RealServer("collector", words, ports, folder, listens=listens, **_before_jaeger(folder, ports), **environ)


def _before_jaeger(folder: Path, ports: Ports) -> dict[str, Any]:
    return {
        "COLLECTOR_LISTEN_HOST": "127.0.0.1",
        "JAEGER_OTLP_ENDPOINT": f"127.0.0.1:{ports.jaeger_otlp_grpc}",
        "COLLECTOR_STORAGE": str(folder / "data"),
    }


def prometheus(folder: Path, targets: Path, ports: Ports) -> RealServer:
    """Make a Prometheus that answers at `prometheus`, and scrapes the Collector and who is named.

    Args:
        folder: For its configuration, its data, which stay, and its log.
        targets: A `discovery_dir`, made where it is not there.
        ports: Where it and the Collector listen.
    """
    targets.mkdir(parents=True, exist_ok=True)
    words = (built(PROMETHEUS), *native.prometheus_arguments(folder, targets, ports, small=False))
    return RealServer("prometheus", words, ports, folder)
