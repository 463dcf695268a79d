"""Run the servers that show a run: Collector, Jaeger, Prometheus, Grafana.

    torchotel stack up             in containers: Docker, or podman-compose
    torchotel stack up --small     without the Collector
    torchotel stack up --native    as plain processes, without Grafana
    torchotel stack status         each server's health and address
    torchotel stack down           stop them; their data stay

The servers listen on 127.0.0.1 only. With --native, servers that are not installed are built with Go.
OTLP_GRPC_PORT, OTLP_HTTP_PORT, JAEGER_PORT, PROMETHEUS_PORT and GRAFANA_PORT choose other ports, and
COLLECTOR_HEALTH_PORT, COLLECTOR_METRICS_PORT and COLLECTOR_TELEMETRY_PORT the Collector's own.
Exit codes: 0 all is well, 1 something is missing or does not answer.
"""

from __future__ import annotations

import argparse
import shlex
import sys

from torchotel._text import printable
from torchotel.cli.parser import Parser


def add_arguments(parser: Parser) -> None:
    """Declare the arguments."""
    parser.set_defaults(call=parser.show_help)
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    up = actions.add_parser("up", help="start the servers", allow_abbrev=False)
    up.add_argument("--small", action="store_true", help="OTLP straight to Jaeger, no Collector")
    up.add_argument("--native", action="store_true", help="plain processes instead of containers, no Grafana")
    down = actions.add_parser("down", help="stop them", allow_abbrev=False)
    status = actions.add_parser("status", help="show the health of each", allow_abbrev=False)
    for action in (up, down, status):
        action.set_defaults(call=call)


def call(arguments: argparse.Namespace) -> int:
    """Do what is asked, or say what is missing."""
    from torchotel.stack.errors import StackError  # noqa: PLC0415 - `torchotel --help` must not wait for it

    try:
        if arguments.action == "up":
            return _up(native=arguments.native, small=arguments.small)
        return _down() if arguments.action == "down" else _status()
    except (StackError, OSError) as error:
        for line in str(error).splitlines():
            print(printable(line), file=sys.stderr)
        return 1


def _up(*, native: bool, small: bool) -> int:
    from torchotel.stack import control, kept, places  # noqa: PLC0415 - as above

    kind = kept.Kind(native=native, small=small)
    ready = control.bring_up(kind, lambda text: print(text, flush=True))
    print(f"up, {kind}:")
    for server in ready.servers:
        purpose = "answers its API, has no pages" if server.name in ready.pageless else server.purpose
        print(f"  {server.name:10} {server.address:44} {purpose}")
    if ready.pageless:
        print("Servers that were built here have no pages. For those take the stack down, and up again once")
        for advice in ready.pageless.values():
            print(f"  {advice}")
    if not kind.native:
        print(
            f"Grafana's user is admin; the password is in {places.state() / 'grafana-password'}, or GRAFANA_PASSWORD."
        )
    print("Then, in the terminal of your training:")
    for name, value in ready.variables.items():
        print(f"  export {name}={shlex.quote(value)}")
    print("  torchotel run train.py        # or your program with torchotel.instrument()")
    return 0


def _down() -> int:
    from torchotel.stack import control  # noqa: PLC0415 - as above

    print(f"down: the stack {control.take_down()}; its data stay")
    return 0


def _status() -> int:
    from torchotel.stack import control  # noqa: PLC0415 - as above

    states = control.states()
    for state in states:
        word = "healthy" if state.healthy else "runs, but does not answer" if state.runs else "down"
        process = f" pid {state.pid}" if state.pid else f" log {state.log}" if state.log else ""
        print(f"{state.server.name:10} {word:8} {state.server.address}{process}")
    return 0 if all(state.healthy for state in states) else 1
