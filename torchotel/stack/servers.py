"""The servers of the stack, as they are seen from this machine: ports, addresses, what each is for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Self

from torchotel.stack.errors import StackError

_MOST = 65535


@dataclass(frozen=True, kw_only=True)
class Ports:
    """Ports on 127.0.0.1; each has a variable, like JAEGER_PORT, that the files in `deploy/` read too."""

    otlp_grpc: int = 4317
    otlp_http: int = 4318
    jaeger: int = 16686
    prometheus: int = 9090
    grafana: int = 3000
    collector_health: int = 13133
    collector_metrics: int = 18889
    """Pushed metrics; not the Collector's own 8889 and 8888, which is Jupyter's."""
    collector_telemetry: int = 18888
    jaeger_grpc: int = 16685
    """This one and those below: where Jaeger is a plain process."""
    jaeger_otlp_grpc: int = 14317
    """Behind the Collector."""
    jaeger_otlp_http: int = 14318

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ, otherwise: Self | None = None) -> Self:
        """Take those that the environment chooses, and else the given ones or the defaults.

        Raises:
            StackError: One is no port.
        """
        said = {
            field.name: environ[_variable(field.name)] for field in fields(cls) if environ.get(_variable(field.name))
        }
        for name, text in said.items():
            if not (text.isdecimal() and 0 < int(text) <= _MOST):
                raise StackError(f"{_variable(name)}: got {text!r}, takes a port between 1 and {_MOST}")
        return replace(otherwise or cls(), **{name: int(text) for name, text in said.items()})

    def variables(self) -> dict[str, str]:
        """Give them as environment variables."""
        return {_variable(field.name): str(getattr(self, field.name)) for field in fields(self)}


@dataclass(frozen=True)
class Server:
    """One server."""

    name: str
    ports: tuple[int, ...]
    """All that it listens on."""
    health: str
    """Answers with 200 once it can be used."""
    address: str
    """Where it is looked at, or sent to."""
    purpose: str
    has_page: bool = True
    """Whether the address is one for a browser."""


def servers(ports: Ports, *, small: bool, native: bool) -> list[Server]:
    """List the servers of a stack, in the order of their start."""
    otlp = (ports.otlp_grpc, ports.otlp_http)
    behind = (ports.jaeger_grpc, *(() if small else (ports.jaeger_otlp_grpc, ports.jaeger_otlp_http))) if native else ()
    jaeger = _url(ports.jaeger)
    prometheus = _url(ports.prometheus)
    found = [
        Server(
            "jaeger",
            (ports.jaeger, *behind, *(otlp if small else ())),
            f"{jaeger}/api/services",
            f"{jaeger}/search",
            "traces by service",
        ),
        Server("prometheus", (ports.prometheus,), f"{prometheus}/-/ready", f"{prometheus}/targets", "scraped ranks"),
    ]
    if not small:
        own = (ports.collector_health, ports.collector_metrics, ports.collector_telemetry)
        health = _url(ports.collector_health)
        found.append(Server("collector", (*otlp, *own), health, _url(ports.otlp_http), "OTLP receiver", has_page=False))
    if not native:
        grafana = _url(ports.grafana)
        board = f"{grafana}/d/torchotel-training"
        found.append(Server("grafana", (ports.grafana,), f"{grafana}/api/health", board, "dashboards"))
    return found


def _url(port: int) -> str:
    return f"http://localhost:{port}"


def _variable(name: str) -> str:
    return f"{name.upper()}_PORT"
