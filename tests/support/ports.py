"""Ports of this machine."""

import random
import socket
from contextlib import ExitStack, suppress

_QUIET = range(10000, 32768)
"""Below those that systems hand to connections: a port may be needed again long after it was found free."""


def free_ports(count: int) -> list[int]:
    """Give ports that nobody listens on, all different."""
    found: list[int] = []
    with ExitStack() as held:
        for port in random.SystemRandom().sample(_QUIET, len(_QUIET)):
            if len(found) == count:
                break
            with suppress(OSError):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(port)
    return found
