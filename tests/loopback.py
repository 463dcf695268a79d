"""Ports of this machine."""

import socket
from contextlib import ExitStack


def free_ports(count: int) -> list[int]:
    """Give ports that nobody listens on, all different."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in held]
