"""Whether servers can be used, asked from outside: most of their images hold nothing that could ask from inside."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from http.client import HTTPException
from urllib.request import ProxyHandler, build_opener

from torchotel.stack.errors import StackError
from torchotel.stack.servers import Server

_ANSWER_S = 3.0
_EVERY_S = 0.2
_OK = 200

_open = build_opener(ProxyHandler({})).open  # a proxy of the user's has no business on this machine


def answers(server: Server) -> bool:
    """Ask a server whether it can be used."""
    return fetched(server.health) is not None


def fetched(address: str) -> bytes | None:
    """Give what is said at an address on this machine; None where it is no good answer."""
    try:
        with _open(address, timeout=_ANSWER_S) as answer:
            return bytes(answer.read()) if answer.status == _OK else None
    except (OSError, HTTPException):
        return None


def await_all(servers: Sequence[Server], patience_s: float, gone: Callable[[Server], str | None]) -> None:
    """Wait until all servers can be used: what answers in the place of one that has ended is another's.

    Args:
        servers: Whom to wait for.
        patience_s: How long in all.
        gone: Tells what a server said last, if it has ended.

    Raises:
        StackError: One has ended, or takes too long.
    """
    deadline_s = time.monotonic() + patience_s
    for server in servers:
        while not answers(server):
            _check_lives(server, gone)
            if time.monotonic() > deadline_s:
                raise StackError(f"{server.name} did not answer at {server.health} within {patience_s:g} s")
            time.sleep(_EVERY_S)
    for server in servers:
        _check_lives(server, gone)


def _check_lives(server: Server, gone: Callable[[Server], str | None]) -> None:
    last_words = gone(server)
    if last_words is not None:
        raise StackError(f"{server.name} ended at once. The end of its log:\n{last_words}")
