"""Declare the servers of the stack: ports, health checks and web pages."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from http.client import HTTPException
from typing import Self
from urllib.request import ProxyHandler, build_opener

from torchotel._utils.process import MAX_PORT


class StackError(Exception):
    """The stack cannot be started, stopped or described; the message gives the reason and an action."""


@dataclass(frozen=True, kw_only=True)
class Ports:
    """Ports on 127.0.0.1. Each has a variable, such as JAEGER_PORT, which the files in `deploy/` read too."""

    otlp_grpc: int = 4317
    otlp_http: int = 4318
    jaeger: int = 16686
    prometheus: int = 9090
    grafana: int = 3000
    collector_health: int = 13133
    collector_metrics: int = 18889
    """Pushed metrics. The Collector's default ports are not used, since Jupyter uses 8888."""
    collector_telemetry: int = 18888
    jaeger_grpc: int = 16685
    """This port and the following ones are used by a Jaeger that is a plain process."""
    jaeger_otlp_grpc: int = 14317
    """Port on which Jaeger receives spans from the Collector."""
    jaeger_otlp_http: int = 14318

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ, base: Self | None = None) -> Self:
        """Return the ports with the changes from environment variables.

        Args:
            environ: Environment variables.
            base: Ports that variables can change; None: the defaults.

        Raises:
            StackError: A variable is not a port.
        """
        overrides = {
            field.name: environ[_variable(field.name)] for field in fields(cls) if environ.get(_variable(field.name))
        }
        for name, text in overrides.items():
            if not (text.isdecimal() and 0 < int(text) <= MAX_PORT):
                raise StackError(f"{_variable(name)}: got {text!r}, takes a port between 1 and {MAX_PORT}")
        return replace(base or cls(), **{name: int(text) for name, text in overrides.items()})

    def variables(self) -> dict[str, str]:
        """Return the ports as environment variables."""
        return {_variable(field.name): str(getattr(self, field.name)) for field in fields(self)}


@dataclass(frozen=True)
class Server:
    """One server of the stack."""

    name: str
    ports: tuple[int, ...]
    """All ports that the server listens on."""
    health: str
    """URL that returns status 200 when the server is ready."""
    address: str
    """URL that users open or send data to."""
    purpose: str
    has_web_ui: bool = True
    """Whether the address is a web page."""


def servers(ports: Ports, *, small: bool, native: bool) -> list[Server]:
    """Return the servers of a stack, in start order."""
    otlp = (ports.otlp_grpc, ports.otlp_http)
    behind = (ports.jaeger_grpc, *(() if small else (ports.jaeger_otlp_grpc, ports.jaeger_otlp_http))) if native else ()
    jaeger = _url(ports.jaeger)
    prometheus = _url(ports.prometheus)
    server_list = [
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
        otlp_url = _url(ports.otlp_http)
        server_list.append(Server("collector", (*otlp, *own), health, otlp_url, "OTLP receiver", has_web_ui=False))
    if not native:
        grafana = _url(ports.grafana)
        board = f"{grafana}/d/torchotel-training"
        server_list.append(Server("grafana", (ports.grafana,), f"{grafana}/api/health", board, "dashboards"))
    return server_list


def _url(port: int) -> str:
    return f"http://localhost:{port}"


def _variable(name: str) -> str:
    return f"{name.upper()}_PORT"


_ANSWER_S = 3.0
_POLL_S = 0.2
_OK = 200

_open = build_opener(ProxyHandler({})).open  # without the user's proxy, since the servers are on this machine


def is_healthy(server: Server) -> bool:
    """Return whether the server is ready."""
    return fetch(server.health) is not None


def fetch(address: str) -> bytes | None:
    """Return the body of a response with status 200 from this machine; None for any other result."""
    try:
        with _open(address, timeout=_ANSWER_S) as answer:
            return bytes(answer.read()) if answer.status == _OK else None
    except (OSError, HTTPException):
        return None


def wait_until_healthy(servers: Sequence[Server], timeout_s: float, log_tail: Callable[[Server], str | None]) -> None:
    """Wait until all servers are ready.

    At the end, each server's process is checked: another program may answer on the port of a server that has ended.

    Args:
        servers: Servers to wait for.
        timeout_s: Limit for all servers together.
        log_tail: Returns the end of a server's log, or None if the server is running.

    Raises:
        StackError: A server has ended, or is not ready in time.
    """
    deadline_s = time.monotonic() + timeout_s
    for server in servers:
        while not is_healthy(server):
            _check_running(server, log_tail)
            if time.monotonic() > deadline_s:
                raise StackError(f"{server.name} did not answer at {server.health} within {timeout_s:g} s")
            time.sleep(_POLL_S)
    for server in servers:
        _check_running(server, log_tail)


def _check_running(server: Server, log_tail: Callable[[Server], str | None]) -> None:
    log = log_tail(server)
    if log is not None:
        raise StackError(f"{server.name} ended at once. The end of its log:\n{log}")


_PLACEHOLDER = b"This is a placeholder for the Jaeger UI home page"


def serves_web_ui(server: Server) -> bool:
    """Return whether the server has its web pages: a Jaeger built without them has a placeholder, Prometheus none."""
    page = fetch(server.address)
    return page is not None and _PLACEHOLDER not in page
