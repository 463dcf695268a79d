"""A small HTTP server that Prometheus scrapes."""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading
from collections.abc import Callable
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from torchotel.exporters.prometheus.exposition import OPENMETRICS, TEXT
from torchotel.exporters.prometheus.negotiation import takes_gzip, wants_openmetrics

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

THREAD_NAME = "torchotel-scrape"
POLL_S = 0.1
"""How long `close` waits for the loop to see it."""
REQUEST_S = 10.0
"""A client that says nothing for so long is left."""


class ScrapeServer:
    """Serve metrics until `close`; as text or OpenMetrics, compressed or not, as the client asks.

    Args:
        write: Gives the whole answer, as OpenMetrics or as text, or None where it can't; it is the same at any path.
        host: Address that is listened on.
        port: 0: any free one.

    Raises:
        OSError: The address can't be had.
    """

    def __init__(self, write: Callable[[bool], bytes | None], host: str, port: int) -> None:
        self._server = _Server(host, port)
        self._server.set_app(_application(write))
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_S,), name=THREAD_NAME, daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Close the port, cut off who is still connected, and end the threads."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._server.cut_off()

    def detach(self) -> None:
        """Close this process's copy of the port: a forked child would keep it open."""
        self._server.socket.close()


def _application(write: Callable[[bool], bytes | None]) -> WSGIApplication:
    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
        if environ["REQUEST_METHOD"] != "GET":
            start_response("405 Method Not Allowed", [("Allow", "GET")])
            return []
        openmetrics = wants_openmetrics(environ.get("HTTP_ACCEPT", ""))
        body = write(openmetrics)
        if body is None:
            start_response("500 Internal Server Error", [])
            return []
        headers = [("Content-Type", OPENMETRICS if openmetrics else TEXT), ("Vary", "Accept, Accept-Encoding")]
        if takes_gzip(environ.get("HTTP_ACCEPT_ENCODING", "")):
            body = gzip.compress(body, compresslevel=1)  # 25 times smaller all the same
            headers.append(("Content-Encoding", "gzip"))
        start_response("200 OK", headers)
        return [body]

    return answer


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_S

    def log_message(self, *args: object) -> None:
        """Say nothing."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        self._connected: dict[socket.socket, threading.Thread] = {}
        self.address_family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        super().__init__((str(address[0]), port), _Handler)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's would ask the DNS for our name, for seconds where that is down
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        thread = threading.current_thread()
        thread.name = THREAD_NAME
        self._connected[request] = thread
        try:
            super().process_request_thread(request, client_address)
        finally:
            del self._connected[request]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that goes away is not our user's business."""

    def cut_off(self) -> None:
        for request, thread in list(self._connected.items()):
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)
            thread.join(1)
