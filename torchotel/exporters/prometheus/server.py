"""The port that Prometheus scrapes, and the thread that answers there."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from torchotel._loading import Loading

if TYPE_CHECKING:
    from torchotel.exporters.prometheus.wsgi import Server

THREAD_NAME = "torchotel-scrape"
POLL_S = 0.1
"""How long `close` waits for the loop to see it."""


class ScrapeServer:
    """Serve metrics until `close`; as text or OpenMetrics, compressed or not, as the client asks.

    Args:
        write: Gives the whole answer, as OpenMetrics or as text, or None where it can't.
        host: Address that is listened on.
        port: 0: any free one.

    Raises:
        OSError: The address can't be had.
    """

    def __init__(self, write: Callable[[bool], bytes | None], host: str, port: int) -> None:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        self._listening = socket.create_server((str(address[0]), port), family=family, dualstack_ipv6=both)
        self.port: int = self._listening.getsockname()[1]
        self._server: Server | None = None
        self._loading, self._loaded = Loading(), threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(write,), name=THREAD_NAME, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the port, cut off who is still connected, and end the threads."""
        self._loaded.wait()
        if self._server is not None:
            self._server.shutdown()
        self._thread.join()
        self._listening.close()
        if self._server is not None:
            self._server.cut_off()

    def detach(self) -> None:
        """Close this process's copy of the port: a forked child would keep it open."""
        self._listening.close()

    def _serve(self, write: Callable[[bool], bytes | None]) -> None:
        try:
            with self._loading:
                from torchotel.exporters.prometheus.wsgi import Server  # noqa: PLC0415  # 6 ms, which nobody waits for

                self._server = Server(self._listening, write, THREAD_NAME)
        finally:
            self._loaded.set()
        self._server.serve_forever(POLL_S)
