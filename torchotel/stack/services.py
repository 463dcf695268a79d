"""The servers of the stack: ports, health checks and web pages."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from http.client import HTTPException
from typing import Self
from urllib.request import ProxyHandler, build_opener


class StackError(Exception):
    """Something is missing, taken or broken; the message says what, and what to do."""


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


_ANSWER_S = 3.0
_EVERY_S = 0.2
_OK = 200

_open = build_opener(ProxyHandler({})).open  # a proxy of the user's has no business on this machine


def answers(server: Server) -> bool:
    """Ask a server whether it can be used."""
    return fetched(server.health) is not None


def fetched(address: str) -> bytes | None:
    """Give what is said at an address on this machine; None where it is no good answer."""
    try:
        with _open(address, timeout=_ANSWER_S) as answer:
            return bytes(answer.read()) if answer.status == _OK else None
    except (OSError, HTTPException):
        return None


def await_all(servers: Sequence[Server], patience_s: float, gone: Callable[[Server], str | None]) -> None:
    """Wait until all servers can be used: what answers in the place of one that has ended is another's.

    Args:
        servers: Whom to wait for.
        patience_s: How long in all.
        gone: Tells what a server said last, if it has ended.

    Raises:
        StackError: One has ended, or takes too long.
    """
    deadline_s = time.monotonic() + patience_s
    for server in servers:
        while not answers(server):
            _check_lives(server, gone)
            if time.monotonic() > deadline_s:
                raise StackError(f"{server.name} did not answer at {server.health} within {patience_s:g} s")
            time.sleep(_EVERY_S)
    for server in servers:
        _check_lives(server, gone)


def _check_lives(server: Server, gone: Callable[[Server], str | None]) -> None:
    last_words = gone(server)
    if last_words is not None:
        raise StackError(f"{server.name} ended at once. The end of its log:\n{last_words}")


_PLACEHOLDER = b"This is a placeholder for the Jaeger UI home page"


def shows_page(server: Server) -> bool:
    """Look at its page; Jaeger shows another in its place, and Prometheus fails."""
    page = fetched(server.address)
    return page is not None and _PLACEHOLDER not in page
