"""Ports that a stack needs and can't have."""

from __future__ import annotations

import errno
import socket
from collections import Counter
from collections.abc import Collection

from torchotel._listening import owner_of
from torchotel.stack.errors import StackError
from torchotel.stack.kept import Stack


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
