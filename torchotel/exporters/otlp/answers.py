"""Answers that come in time as a whole: the timeout of `requests` is that of each wait, and so holds nobody to it."""

import http.client
import io
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.connection import HTTPConnection, HTTPSConnection

_deadline_s: ContextVar[float] = ContextVar("torchotel_answer_deadline_s", default=float("inf"))


@contextmanager
def answered_until(deadline_s: float) -> Iterator[None]:
    """Bound the answers of requests that are sent in here, their heads and bodies, by `time.monotonic()`."""
    token = _deadline_s.set(deadline_s)
    try:
        yield
    finally:
        _deadline_s.reset(token)


class TimedAdapter(HTTPAdapter):
    """Connect so that `answered_until` holds, through a proxy too."""

    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        """Make the pools of direct connections."""
        super().init_poolmanager(*args, **options)
        self.poolmanager.pool_classes_by_scheme = _POOLS

    def proxy_manager_for(self, *args: Any, **options: Any) -> Any:
        """Make the pools of connections through a proxy."""
        manager = super().proxy_manager_for(*args, **options)
        manager.pool_classes_by_scheme = _POOLS
        return manager


class _TimedReader(io.RawIOBase):
    """Read from a socket until the deadline; each wait is cut to what is left."""

    def __init__(self, stream: io.RawIOBase, connection: socket.socket) -> None:
        self._stream, self._connection = stream, connection
        self._deadline_s = _deadline_s.get()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        if left_s < float("inf"):
            self._connection.settimeout(left_s)
        return self._stream.readinto(buffer)

    def close(self) -> None:
        self._stream.close()
        super().close()


class _TimedResponse(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self.fp = io.BufferedReader(_TimedReader(self.fp.detach(), sock))


class _Connection(HTTPConnection):
    response_class = _TimedResponse


class _SecureConnection(HTTPSConnection):
    response_class = _TimedResponse


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _SecurePool(HTTPSConnectionPool):
    ConnectionCls = _SecureConnection


_POOLS = {"http": _Pool, "https": _SecurePool}
