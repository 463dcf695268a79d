"""Bring the stack up, take it down, and say how it is."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torchotel._listening import owner_of
from torchotel.stack import containers, native, places
from torchotel.stack.errors import StackError
from torchotel.stack.health import answers, await_all
from torchotel.stack.places import Kind
from torchotel.stack.servers import Ports, Server, servers

_PATIENCE_S = 180.0
"""Until the servers answer: Jaeger opens what it stored first."""


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
    kept = places.kept_kind()
    if kept not in {None, kind}:
        raise StackError(f"the stack is up {kept}: take that down first (torchotel stack down)")
    ports = Ports.read()
    wanted = servers(ports, small=kind.small, native=kind.native)
    engine = None if kind.native else containers.find_engine()
    if kept is None:
        _check_ports(ports, wanted)
    binaries = native.binaries(wanted, say) if kind.native else {}
    kind.keep()  # from here on there is something to take down
    if engine is None:
        native.start(binaries, ports, small=kind.small)
    else:
        containers.up(engine, ports, small=kind.small)
    say("waiting until all answer")
    await_all(wanted, _PATIENCE_S, lambda server: native.process(server.name).last_words() if kind.native else None)
    return Ready(wanted, _variables(ports, kind, pushed=engine is not None and not engine.reaches_loopback))


def take_down() -> Kind:
    """Stop the stack that is up, and give what it was; the data stay.

    Raises:
        StackError: The container engine is gone, or no stack is up.
    """
    kind = places.kept_kind()
    if kind is None:
        raise StackError("no stack is up that torchotel has brought up")
    if kind.native:
        native.stop()
    else:
        containers.down(containers.find_engine(), Ports.read())
    places.forget_kind()
    return kind


def states() -> list[State]:
    """Ask every server of the stack that is up, in containers where none was brought up by us."""
    kind = places.kept_kind() or Kind()
    return [
        State(server, answers(server), native.process(server.name).pid if kind.native else None)
        for server in servers(Ports.read(), small=kind.small, native=kind.native)
    ]


def _check_ports(ports: Ports, wanted: Iterable[Server]) -> None:
    chosen_by = {int(port): variable for variable, port in ports.variables().items()}
    needed = [(server, port, _owner(port)) for server in wanted for port in server.ports]
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


def _variables(ports: Ports, kind: Kind, *, pushed: bool) -> dict[str, str]:
    """Say to a program where the stack is, as far as that is not what it takes for granted."""
    variables = {} if pushed else {"TORCHOTEL_DISCOVERY_DIR": str(places.targets())}
    if ports.otlp_http != Ports.otlp_http:
        variables["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://localhost:{ports.otlp_http}"
    if pushed:
        variables["OTEL_METRICS_EXPORTER"] = "otlp"
    if pushed and kind.small:
        receiver = f"http://localhost:{ports.prometheus}/api/v1/otlp/v1/metrics"
        variables["OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"] = receiver
    return variables
