"""A port that is listened on from the start, and answered as soon as there is a server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchotel.exporters.prometheus.server import ScrapeServer

WAITING = 5
"""Clients that may wait until they are answered."""


class Listener:
    """Listen on a port; who comes before `serve` waits, since what knows HTTP takes a while to load.

    Args:
        host: Address that is listened on.
        port: 0: any free one.

    Raises:
        OSError: The address can't be had.
        UnicodeError: The host can be no name.
    """

    def __init__(self, host: str, port: int) -> None:
        name = host.encode() if host.isascii() else host  # of a string Python asks what knows all languages' names
        family, *_, address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # `::` means every address
        self._socket = socket.create_server(
            (str(address[0]), port), family=family, backlog=WAITING, dualstack_ipv6=both
        )
        self.port: int = self._socket.getsockname()[1]
        self._server: ScrapeServer | None = None
        self._closed = False
        self._lock = threading.Lock()

    def serve(self, write: Callable[[bool], bytes | None]) -> None:
        """Answer from now on; called on the worker.

        Args:
            write: Gives the whole answer, as OpenMetrics or as text, or None where it can't.

        Raises:
            RuntimeError: No thread can be started; not where the program ends, for nobody is to be answered any more.
            OSError: There are too many open files.
        """
        from torchotel.exporters.prometheus.server import ScrapeServer  # noqa: PLC0415  # what is slow to load

        with self._lock:
            if self._closed:
                return
            try:
                self._server = ScrapeServer(write, self._socket)
            except RuntimeError:
                if threading.main_thread().is_alive():
                    raise

    def close(self) -> None:
        """Close the port, cut off who is still connected, and end the threads."""
        with self._lock:
            self._closed = True
        if self._server is not None:
            self._server.close()
        self._socket.close()

    def detach(self) -> None:
        """Close this process's copy of the port: a forked child would keep it open."""
        self._socket.close()
