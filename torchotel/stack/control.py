"""Bring the stack up, take it down, and say how it is."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from dataclasses import dataclass

from torchotel._listening import owner_of
from torchotel.stack import containers, kept, native, places
from torchotel.stack.errors import StackError
from torchotel.stack.health import answers, await_all
from torchotel.stack.kept import Kind, Stack
from torchotel.stack.servers import Ports, Server

_PATIENCE_S = 180.0
"""Until the servers answer: Jaeger opens what it stored first."""
_PUSH_MS = "5000"
"""Grafana reckons with a point as often as Prometheus scrapes."""


@dataclass(frozen=True)
class State:
    """How a server is."""

    server: Server
    healthy: bool
    pid: int | None
    """Of a plain process that runs."""


@dataclass(frozen=True)
class Ready:
    """What a program needs to know to be seen."""

    servers: list[Server]
    variables: dict[str, str]
    """For its environment."""


def bring_up(kind: Kind, say: Callable[[str], None]) -> Ready:
    """Start what does not run, and wait until all of it answers.

    Raises:
        StackError: Something is missing, or a port is taken.
    """
    stack = _same_or_new(kind)
    binaries = native.binaries(stack.servers, say) if kind.native else {}
    stack.keep()  # from here on there is something to take down
    if stack.engine is None:
        native.start(binaries, stack.ports, small=kind.small)
    else:
        containers.up(stack.engine, stack.ports, small=kind.small)
    say("waiting until all answer")
    gone = native.last_words if kind.native else lambda _: None
    await_all(stack.servers, _PATIENCE_S, gone)
    return Ready(stack.servers, _variables(stack))


def take_down() -> Kind:
    """Stop the stack that is up, and give what it was; the data stay.

    Raises:
        StackError: The container engine is gone, or no stack is up.
    """
    stack = kept.kept()
    if stack is None:
        raise StackError("no stack is up that torchotel has brought up")
    if stack.engine is None:
        native.stop()
    else:
        containers.down(stack.engine, stack.ports)
    kept.forget()
    return stack.kind


def states() -> list[State]:
    """Ask every server of the stack that is up, in containers where none was brought up by us."""
    stack = kept.kept() or Stack(Kind(), Ports.read(), None)
    return [
        State(server, answers(server), native.process(server).pid if stack.kind.native else None)
        for server in stack.servers
    ]


def _same_or_new(kind: Kind) -> Stack:
    """Give the stack that is up, if it is the one that is wanted, else a new one whose ports are free."""
    up = kept.kept()
    if up is None:
        new = Stack(kind, Ports.read(), None if kind.native else containers.find_engine())
        _check_ports(new)
        return new
    if up.kind != kind:
        raise StackError(f"the stack is up {up.kind}: take that down first (torchotel stack down)")
    if Ports.read(otherwise=up.ports) != up.ports:
        raise StackError("the stack is up on other ports: take that down first (torchotel stack down)")
    return up


def _check_ports(stack: Stack) -> None:
    chosen_by = {int(port): variable for variable, port in stack.ports.variables().items()}
    needed = [(server, port, _owner(port)) for server in stack.servers for port in server.ports]
    taken = [
        f"  {port} of {server.name}: {owner}; {chosen_by[port]} chooses another"
        for server, port, owner in needed
        if owner
    ]
    if taken:
        raise StackError(
            "\n".join(["these ports of 127.0.0.1 are taken:", *taken, "End what has them, or choose others."])
        )


def _owner(port: int) -> str | None:
    """Name who has a port; None where it is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the servers themselves do
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return (owner_of(port) or "another program") if error.errno == errno.EADDRINUSE else str(error)
    return None


def _variables(stack: Stack) -> dict[str, str]:
    """Say to a program where the stack is, as far as that is not what it takes for granted."""
    ports, pushed = stack.ports, stack.engine is not None and not stack.engine.reaches_loopback
    variables = {} if pushed else {"TORCHOTEL_DISCOVERY_DIR": str(places.targets())}
    if ports.otlp_http != Ports.otlp_http:
        variables["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://localhost:{ports.otlp_http}"
    if pushed:
        variables |= {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_METRIC_EXPORT_INTERVAL": _PUSH_MS}
    if pushed and stack.kind.small:
        receiver = f"http://localhost:{ports.prometheus}/api/v1/otlp/v1/metrics"
        variables["OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"] = receiver
    return variables
