"""Run the servers that show a run: Collector, Jaeger, Prometheus, Grafana.

    torchotel stack up             in containers: Docker, or podman-compose
    torchotel stack up --small     without the Collector
    torchotel stack up --native    as plain processes, without Grafana
    torchotel stack status         show the health and address of each server
    torchotel stack down           stop the servers and keep their data

The servers listen on 127.0.0.1 only. With --native, their binaries are taken from
TORCHOTEL_BACKENDS, by default ~/.cache/torchotel/backends, or from PATH.
OTLP_GRPC_PORT, OTLP_HTTP_PORT, JAEGER_PORT, PROMETHEUS_PORT and GRAFANA_PORT set other ports. COLLECTOR_HEALTH_PORT,
COLLECTOR_METRICS_PORT and COLLECTOR_TELEMETRY_PORT set the ports of the Collector's health and metrics.
Exit codes: 0 success; 1 a server is missing, failed or does not answer; 2 wrong usage.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import TYPE_CHECKING, TextIO

from torchotel._utils.text import printable
from torchotel.cli.terminal import Terminal
from torchotel.stack import manager, paths
from torchotel.stack.services import StackError

if TYPE_CHECKING:
    from torchotel.cli import Parser


def add_arguments(parser: Parser) -> None:
    """Declare the arguments."""
    parser.set_defaults(call=parser.show_help)
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    up = actions.add_parser("up", help="start the servers", allow_abbrev=False)
    up.add_argument("--small", action="store_true", help="send OTLP directly to Jaeger, without the Collector")
    up.add_argument("--native", action="store_true", help="plain processes instead of containers, without Grafana")
    down = actions.add_parser("down", help="stop the servers", allow_abbrev=False)
    status = actions.add_parser("status", help="show the health of each server", allow_abbrev=False)
    for action in (up, down, status):
        action.set_defaults(call=call)


def call(arguments: argparse.Namespace) -> int:
    """Run the action; return 1 if it failed or a server is unhealthy."""
    try:
        if arguments.action == "up":
            return _up(native=arguments.native, small=arguments.small)
        return _down() if arguments.action == "down" else _status()
    except (StackError, OSError) as error:
        _print(str(error), sys.stderr)
        return 1


def _up(*, native: bool, small: bool) -> int:
    kind = manager.Kind(native=native, small=small)
    ready = manager.bring_up(kind, _print)
    _print(f"The stack is up {kind}:")
    width = max(len(server.address) for server in ready.servers)
    for server in ready.servers:
        purpose = "API only, no web pages" if server.name in ready.without_web_ui else server.purpose
        _print(f"  {server.name:10} {server.address:{width}} {purpose}")
    if ready.without_web_ui:
        _print("Servers that were built with Go have no web pages. For the pages of a release:")
        for advice in ready.without_web_ui.values():
            _print(f"  {advice}")
        _print("Then run torchotel stack down and start the stack again.")
    if not kind.native:
        _print("Grafana's user is admin. The password is GRAFANA_PASSWORD if that is set, else it is in")
        _print(f"  {paths.state() / 'grafana-password'}")
    _print("Run your training in a terminal with these variables:" if ready.variables else "Run your training:")
    for name, value in ready.variables.items():
        print(f"  export {name}={shlex.quote(value)}")  # not wrapped, so that it can be copied
    print("  torchotel run train.py        # or your program with torchotel.instrument()")
    return 0


def _down() -> int:
    _print(f"The stack that was up {manager.take_down()} is down. Its data is kept.")
    return 0


def _status() -> int:
    states = manager.states()
    for state in states:
        word = "healthy" if state.healthy else "unhealthy" if state.runs else "down"
        process = f" pid {state.pid}" if state.pid else f" log {state.log}" if state.log else ""
        _print(f"{state.server.name:10} {word:9} {state.server.address}{process}")
    return 0 if all(state.healthy for state in states) else 1


def _print(text: str, stream: TextIO | None = None) -> None:
    """Print lines, wrapped to the terminal's width."""
    terminal = Terminal(stream)
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        for piece in terminal.wrap(printable(line.expandtabs()), indent):
            print(piece, file=stream, flush=True)
