"""Start, stop and describe the local stack, in containers or as plain processes."""

from __future__ import annotations

import errno
import json
import socket
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from torchotel._utils.installation import own_targets
from torchotel._utils.process import owner_of
from torchotel.stack import compose, native, paths
from torchotel.stack.compose import Engine
from torchotel.stack.services import Ports, Server, StackError, is_healthy, servers, wait_until_healthy


@dataclass(frozen=True)
class Kind:
    """The kind of stack: in containers or native, with or without the Collector."""

    native: bool = False
    small: bool = False

    @property
    def command(self) -> str:
        """The command that starts a stack of this kind."""
        return f"torchotel stack up{' --native' if self.native else ''}{' --small' if self.small else ''}"

    def __str__(self) -> str:
        words = "as plain processes" if self.native else "in containers"
        return f"{words}, without the Collector" if self.small else words


@dataclass(frozen=True)
class Stack:
    """A stack, with its ports and its engine."""

    kind: Kind
    ports: Ports
    engine: Engine | None
    """None for plain processes."""
    targets: str
    """The folder from which Prometheus reads the scrape endpoints of ranks."""

    @property
    def servers(self) -> list[Server]:
        """The stack's servers, in start order."""
        return servers(self.ports, small=self.kind.small, native=self.kind.native)

    def save(self) -> None:
        """Save the stack for later commands, which cannot detect its ports and engine."""
        _file().write_text(json.dumps(asdict(self)))


def load_stack() -> Stack | None:
    """Return the stack that was started; None if there is none."""
    if not _file().exists():
        return None
    read = json.loads(_file().read_text())
    engine = read["engine"] and Engine(tuple(read["engine"]["command"]), read["engine"]["reaches_loopback"])
    return Stack(Kind(**read["kind"]), Ports(**read["ports"]), engine, read["targets"])


def delete_state() -> None:
    """Delete the saved state, since no stack is up."""
    _file().unlink(missing_ok=True)


def _file() -> Path:
    return paths.state() / "up.json"


def check_ports(stack: Stack, running: Collection[str]) -> None:
    """Check that the ports of servers that are not running are free, and that all ports differ.

    Raises:
        StackError: Two servers have the same port, or another program listens on one.
    """
    variables = {variable: int(port) for variable, port in stack.ports.variables().items()}
    times = Counter(port for server in stack.servers for port in server.ports)
    duplicates = [
        f"  {port}: {', '.join(variable for variable, chosen in variables.items() if chosen == port)}"
        for port in times
        if times[port] > 1
    ]
    if duplicates:
        raise StackError(
            "\n".join(
                ["these ports are set more than once, so nothing was started:", *duplicates, "Set different ports."]
            )
        )
    chosen_by = {port: variable for variable, port in variables.items()}
    needed = [(server.name, port) for server in stack.servers if server.name not in running for port in server.ports]
    in_use = [
        f"  {port} of {name}: {owner}; {chosen_by[port]} sets another port"
        for name, port in needed
        if (owner := _find_owner(port))
    ]
    if in_use:
        raise StackError(
            "\n".join(
                [
                    "these ports of 127.0.0.1 are taken, so nothing was started:",
                    *in_use,
                    "Stop the programs that listen there, or set other ports.",
                ]
            )
        )


def _find_owner(port: int) -> str | None:
    """Return a description of the program that listens on a port; None if the port is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the servers do
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return (owner_of(port) or "another program") if error.errno == errno.EADDRINUSE else str(error)
    return None


_START_TIMEOUT_S = 180.0
"""Seconds until the servers must answer; Jaeger first opens its stored traces."""
_PUSH_MS = "5000"
"""Milliseconds between exports: dashboards expect as many points as from a scrape every 5 s."""

_NO_STACK = "no stack is up; torchotel stack up starts one"


@dataclass(frozen=True)
class State:
    """The state of a server."""

    server: Server
    runs: bool
    """Whether a process or a container of the stack is running."""
    responds: bool
    pid: int | None
    """Process id, of a plain process that is running."""
    log: Path | None
    """Log file, of a plain process."""

    @property
    def healthy(self) -> bool:
        """Whether the server of the stack answers, and not another program on its port."""
        return self.runs and self.responds


@dataclass(frozen=True)
class Ready:
    """The stack after its start, and the variables that a program needs to use it."""

    servers: list[Server]
    variables: dict[str, str]
    """Environment variables for programs."""
    without_web_ui: dict[str, str]
    """Advice by server, for servers without their web pages."""


def bring_up(kind: Kind, report: Callable[[str], None]) -> Ready:
    """Start the servers that are not running, and wait until all servers answer.

    Raises:
        StackError: A program is missing, a port is in use, or a server failed.
    """
    stack = _select_stack(kind)
    running_before = _running(stack)
    check_ports(stack, running_before)
    binaries = native.find_binaries(stack.servers) if kind.native else {}
    stack.save()  # from here on, `down` has servers to stop
    try:
        if stack.engine is None:
            native.start(binaries, stack.ports, stack.targets, small=kind.small)
        else:
            compose.up(stack.engine, stack.ports, stack.targets, small=kind.small)
        report("waiting for the servers to answer")
        wait_until_healthy(stack.servers, _START_TIMEOUT_S, lambda server: _log_tail(stack, server))
    except BaseException:
        _stop_after_failure(stack, running_before, report)
        raise
    without_web_ui = native.without_web_ui(stack.servers) if kind.native else {}
    return Ready(stack.servers, _variables(stack), without_web_ui)


def take_down() -> Kind:
    """Stop the stack and return its kind; the data are kept.

    Raises:
        StackError: The container engine is missing, or no stack is up.
    """
    stack = load_stack()
    if stack is None:
        raise StackError(_NO_STACK)
    if stack.engine is None:
        native.stop()
    else:
        compose.down(stack.engine, stack.ports, stack.targets)
    delete_state()
    return stack.kind


def running_stack() -> Stack | None:
    """Return the started stack, if any of its servers is running."""
    stack = load_stack()
    return stack if stack is not None and _running(stack) else None


def states() -> list[State]:
    """Return the state of each server of the stack.

    Raises:
        StackError: No stack is up; the message names other programs that answer on its ports.
    """
    stack = load_stack()
    if stack is None:
        foreign = [server for server in servers(Ports.read(), small=False, native=False) if is_healthy(server)]
        lines = [f"  another program answers at {server.health}" for server in foreign]
        raise StackError("\n".join([_NO_STACK, *lines]))
    if stack.engine is not None:
        running = compose.running(stack.engine)
        return [State(server, server.name in running, is_healthy(server), None, None) for server in stack.servers]
    pids = native.pids(stack.servers)
    return [
        State(server, server.name in pids, is_healthy(server), pids.get(server.name), native.log(server))
        for server in stack.servers
    ]


def _select_stack(kind: Kind) -> Stack:
    """Return the running stack if it is of this kind and has the same ports, or a new stack if none is running."""
    up = load_stack()
    if up is not None and up.engine is None and not _running(up):
        delete_state()  # its processes were killed, or the machine was restarted
        up = None
    if up is None:
        targets = paths.targets()  # raises if the folder cannot be created, before anything is started
        return Stack(kind, Ports.read(), None if kind.native else compose.find_engine(), targets)
    if up.kind != kind:
        raise StackError(
            f"a stack is up {up.kind}, so no other stack was started.\n"
            f"To start its stopped servers: {up.kind.command}\n"
            "To replace it, first run: torchotel stack down"
        )
    if Ports.read(base=up.ports) != up.ports:
        raise StackError("the stack is up on other ports, so nothing was started: run torchotel stack down first")
    if paths.targets(up.targets) != up.targets:
        raise StackError(
            f"the stack that is up scrapes the targets in {up.targets}, so nothing was started: "
            "run torchotel stack down first"
        )
    return up


def _stop_after_failure(stack: Stack, running_before: Collection[str], report: Callable[[str], None]) -> None:
    """Stop servers after a failed start. Containers are left, since their logs would be deleted with them."""
    if stack.engine is not None:
        if compose.exists(stack.engine):
            report("some containers may still run: torchotel stack down stops them")
        else:  # the engine pulled no image
            delete_state()
        return
    report("stopping the servers that were started")
    native.stop(except_for=running_before)
    if not running_before:
        delete_state()


def _running(stack: Stack) -> Collection[str]:
    """Return the names of the servers with a running process or container of the stack."""
    return native.pids(stack.servers) if stack.engine is None else compose.running(stack.engine)


def _log_tail(stack: Stack, server: Server) -> str | None:
    """Return the end of the log of a stopped server; None if the server is running."""
    return native.log_tail(server) if stack.engine is None else compose.log_tail(stack.engine, server)


def _variables(stack: Stack) -> dict[str, str]:
    """Return the environment variables that a program needs, if the stack differs from torchotel's defaults."""
    ports, pushed = stack.ports, stack.engine is not None and not stack.engine.reaches_loopback
    found_unasked = pushed or stack.targets == str(own_targets(paths.state()))
    variables = {} if found_unasked else {"TORCHOTEL_DISCOVERY_DIR": stack.targets}
    if ports.otlp_http != Ports.otlp_http:
        variables["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://localhost:{ports.otlp_http}"
    if pushed:
        variables |= {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_METRIC_EXPORT_INTERVAL": _PUSH_MS}
    if pushed and stack.kind.small:
        receiver = f"http://localhost:{ports.prometheus}/api/v1/otlp/v1/metrics"
        variables["OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"] = receiver
    return variables
