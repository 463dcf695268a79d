"""Bring the stack up, take it down, and say how it is."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from torchotel._stack_folder import own_targets
from torchotel.stack import containers, kept, native, places
from torchotel.stack.errors import StackError
from torchotel.stack.health import answers, await_all
from torchotel.stack.kept import Kind, Stack
from torchotel.stack.servers import Ports, Server, servers
from torchotel.stack.taken import check_ports

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
    binaries = native.binaries(stack.servers, say) if kind.native else {}
    stack.keep()  # from here on there is something to take down
    try:
        if stack.engine is None:
            native.start(binaries, stack.ports, stack.targets, small=kind.small)
        else:
            containers.up(stack.engine, stack.ports, stack.targets, small=kind.small)
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
    stack = kept.kept()
    if stack is None:
        raise StackError(_NO_STACK)
    if stack.engine is None:
        native.stop()
    else:
        containers.down(stack.engine, stack.ports, stack.targets)
    kept.forget()
    return stack.kind


def stack_that_runs() -> Stack | None:
    """Give the stack that was brought up, if any server of it runs."""
    stack = kept.kept()
    return stack if stack is not None and _running(stack) else None


def states() -> list[State]:
    """Ask every server of the stack that is up.

    Raises:
        StackError: No stack is up; it says what answers all the same.
    """
    stack = kept.kept()
    if stack is None:
        others = [server for server in servers(Ports.read(), small=False, native=False) if answers(server)]
        raise StackError("\n".join([_NO_STACK, *(f"  another program answers at {one.health}" for one in others)]))
    if stack.engine is not None:
        running = containers.running(stack.engine)
        return [State(server, server.name in running, answers(server), None, None) for server in stack.servers]
    pids = native.pids(stack.servers)
    return [
        State(server, server.name in pids, answers(server), pids.get(server.name), native.log(server))
        for server in stack.servers
    ]


def _same_or_new(kind: Kind) -> Stack:
    """Give the stack that is up, if it is the one that is wanted, else a new one."""
    up = kept.kept()
    if up is not None and up.engine is None and not _running(up):
        kept.forget()  # it went with the machine, or was killed
        up = None
    if up is None:
        targets = places.targets()  # where that can't be made nothing is started
        return Stack(kind, Ports.read(), None if kind.native else containers.find_engine(), targets)
    if up.kind != kind:
        raise StackError(
            f"a stack is up {up.kind}, so no other stack was started.\n"
            f"To start its stopped servers: {up.kind.command}\n"
            "To replace it, first run: torchotel stack down"
        )
    if Ports.read(otherwise=up.ports) != up.ports:
        raise StackError("the stack is up on other ports, so nothing was started: run torchotel stack down first")
    if places.targets(up.targets) != up.targets:
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
        kept.forget()


def _running(stack: Stack) -> Collection[str]:
    """Name the servers that run as processes or containers of the stack."""
    return native.pids(stack.servers) if stack.engine is None else containers.running(stack.engine)


def _last_words(stack: Stack, server: Server) -> str | None:
    """Give the end of the log of a server that does not run."""
    return native.last_words(server) if stack.engine is None else containers.last_words(stack.engine, server)


def _variables(stack: Stack) -> dict[str, str]:
    """Say to a program where the stack is, as far as that is not what it takes for granted."""
    ports, pushed = stack.ports, stack.engine is not None and not stack.engine.reaches_loopback
    found_unasked = pushed or stack.targets == str(own_targets(places.state()))
    variables = {} if found_unasked else {"TORCHOTEL_DISCOVERY_DIR": stack.targets}
    if ports.otlp_http != Ports.otlp_http:
        variables["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://localhost:{ports.otlp_http}"
    if pushed:
        variables |= {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_METRIC_EXPORT_INTERVAL": _PUSH_MS}
    if pushed and stack.kind.small:
        receiver = f"http://localhost:{ports.prometheus}/api/v1/otlp/v1/metrics"
        variables["OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"] = receiver
    return variables
