"""Start, stop and describe the local stack, whichever way it runs."""

from __future__ import annotations

import errno
import json
import socket
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from torchotel._utils.process import owner_of
from torchotel._utils.state_dir import own_targets
from torchotel.stack import compose, native, paths
from torchotel.stack.compose import Engine
from torchotel.stack.services import Ports, Server, StackError, answers, await_all, servers


@dataclass(frozen=True)
class Kind:
    """Which stack it is."""

    native: bool = False
    small: bool = False

    @property
    def command(self) -> str:
        """What brings it up."""
        return f"torchotel stack up{' --native' if self.native else ''}{' --small' if self.small else ''}"

    def __str__(self) -> str:
        words = "as plain processes" if self.native else "in containers"
        return f"{words}, without the Collector" if self.small else words


@dataclass(frozen=True)
class Stack:
    """A stack, where it listens and what runs it."""

    kind: Kind
    ports: Ports
    engine: Engine | None
    """None for plain processes."""
    targets: str
    """The folder in which ranks name their endpoints to it."""

    @property
    def servers(self) -> list[Server]:
        """Its servers, in the order of their start."""
        return servers(self.ports, small=self.kind.small, native=self.kind.native)

    def keep(self) -> None:
        """Remember it: neither its ports nor its engine can be found out later."""
        _file().write_text(json.dumps(asdict(self)))


def kept() -> Stack | None:
    """Give the stack that was brought up; None where none was."""
    if not _file().exists():
        return None
    read = json.loads(_file().read_text())
    engine = read["engine"] and Engine(tuple(read["engine"]["command"]), read["engine"]["reaches_loopback"])
    return Stack(Kind(**read["kind"]), Ports(**read["ports"]), engine, read["targets"])


def forget() -> None:
    """Say that no stack is up."""
    _file().unlink(missing_ok=True)


def _file() -> Path:
    return paths.state() / "up.json"


def check_ports(stack: Stack, running: Collection[str]) -> None:
    """Look whether every server can have its ports; those that run have theirs.

    Raises:
        StackError: Two of them would have the same, or another program has one.
    """
    variables = {variable: int(port) for variable, port in stack.ports.variables().items()}
    times = Counter(port for server in stack.servers for port in server.ports)
    twice = [
        f"  {port}: {', '.join(variable for variable, chosen in variables.items() if chosen == port)}"
        for port in times
        if times[port] > 1
    ]
    if twice:
        raise StackError(
            "\n".join(["these ports are set more than once, so nothing was started:", *twice, "Set different ports."])
        )
    chosen_by = {port: variable for variable, port in variables.items()}
    needed = [(server.name, port) for server in stack.servers if server.name not in running for port in server.ports]
    taken = [
        f"  {port} of {name}: {owner}; {chosen_by[port]} sets another port"
        for name, port in needed
        if (owner := _owner(port))
    ]
    if taken:
        raise StackError(
            "\n".join(
                [
                    "these ports of 127.0.0.1 are taken, so nothing was started:",
                    *taken,
                    "Stop the programs that listen there, or set other ports.",
                ]
            )
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


_PATIENCE_S = 180.0
"""Until the servers answer: Jaeger opens what it stored first."""
_PUSH_MS = "5000"
"""Grafana reckons with a point as often as Prometheus scrapes."""

_NO_STACK = "no stack is up; torchotel stack up starts one"


@dataclass(frozen=True)
class State:
    """How a server is."""

    server: Server
    runs: bool
    """As a process or a container of the stack."""
    answers: bool
    pid: int | None
    """Of a plain process that runs."""
    log: Path | None
    """Of a plain process that ought to run."""

    @property
    def healthy(self) -> bool:
        """Whether it can be used, and is no other that answers in its place."""
        return self.runs and self.answers


@dataclass(frozen=True)
class Ready:
    """What a program needs to know to be seen."""

    servers: list[Server]
    variables: dict[str, str]
    """For its environment."""
    pageless: dict[str, str]
    """Servers that should show pages and have none, with what to do."""


def bring_up(kind: Kind, say: Callable[[str], None]) -> Ready:
    """Start what does not run, and wait until all of it answers.

    Raises:
        StackError: Something is missing, or a port is taken.
    """
    stack = _same_or_new(kind)
    before = _running(stack)
    check_ports(stack, before)
    binaries = native.find_binaries(stack.servers) if kind.native else {}
    stack.keep()  # from here on there is something to take down
    try:
        if stack.engine is None:
            native.start(binaries, stack.ports, stack.targets, small=kind.small)
        else:
            compose.up(stack.engine, stack.ports, stack.targets, small=kind.small)
        say("waiting for the servers to answer")
        await_all(stack.servers, _PATIENCE_S, lambda server: _last_words(stack, server))
    except BaseException:
        _clear_up(stack, before, say)
        raise
    pageless = native.pageless(stack.servers) if kind.native else {}
    return Ready(stack.servers, _variables(stack), pageless)


def take_down() -> Kind:
    """Stop the stack that is up, and give what it was; the data stay.

    Raises:
        StackError: The container engine is gone, or no stack is up.
    """
    stack = kept()
    if stack is None:
        raise StackError(_NO_STACK)
    if stack.engine is None:
        native.stop()
    else:
        compose.down(stack.engine, stack.ports, stack.targets)
    forget()
    return stack.kind


def stack_that_runs() -> Stack | None:
    """Give the stack that was brought up, if any server of it runs."""
    stack = kept()
    return stack if stack is not None and _running(stack) else None


def states() -> list[State]:
    """Ask every server of the stack that is up.

    Raises:
        StackError: No stack is up; it says what answers all the same.
    """
    stack = kept()
    if stack is None:
        others = [server for server in servers(Ports.read(), small=False, native=False) if answers(server)]
        raise StackError("\n".join([_NO_STACK, *(f"  another program answers at {one.health}" for one in others)]))
    if stack.engine is not None:
        running = compose.running(stack.engine)
        return [State(server, server.name in running, answers(server), None, None) for server in stack.servers]
    pids = native.pids(stack.servers)
    return [
        State(server, server.name in pids, answers(server), pids.get(server.name), native.log(server))
        for server in stack.servers
    ]


def _same_or_new(kind: Kind) -> Stack:
    """Give the stack that is up, if it is the one that is wanted, else a new one."""
    up = kept()
    if up is not None and up.engine is None and not _running(up):
        forget()  # it went with the machine, or was killed
        up = None
    if up is None:
        targets = paths.targets()  # where that can't be made nothing is started
        return Stack(kind, Ports.read(), None if kind.native else compose.find_engine(), targets)
    if up.kind != kind:
        raise StackError(
            f"a stack is up {up.kind}, so no other stack was started.\n"
            f"To start its stopped servers: {up.kind.command}\n"
            "To replace it, first run: torchotel stack down"
        )
    if Ports.read(otherwise=up.ports) != up.ports:
        raise StackError("the stack is up on other ports, so nothing was started: run torchotel stack down first")
    if paths.targets(up.targets) != up.targets:
        raise StackError(
            f"the stack that is up scrapes the targets in {up.targets}, so nothing was started: "
            "run torchotel stack down first"
        )
    return up


def _clear_up(stack: Stack, before: Collection[str], say: Callable[[str], None]) -> None:
    """End what was started in vain; of containers only say so, since their logs would go with them."""
    if stack.engine is not None:
        say("some containers may still run: torchotel stack down stops them")
        return
    say("stopping the servers that were started")
    native.stop(but=before)
    if not before:
        forget()


def _running(stack: Stack) -> Collection[str]:
    """Name the servers that run as processes or containers of the stack."""
    return native.pids(stack.servers) if stack.engine is None else compose.running(stack.engine)


def _last_words(stack: Stack, server: Server) -> str | None:
    """Give the end of the log of a server that does not run."""
    return native.last_words(server) if stack.engine is None else compose.last_words(stack.engine, server)


def _variables(stack: Stack) -> dict[str, str]:
    """Say to a program where the stack is, as far as that is not what it takes for granted."""
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
