"""A small HTTP server that Prometheus scrapes."""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading
import time
from collections.abc import Callable
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from torchotel.config.otlp_endpoint import is_loopback
from torchotel.exporters.prometheus.exposition import OPENMETRICS, TEXT
from torchotel.exporters.prometheus.hosts import names_this_machine
from torchotel.exporters.prometheus.negotiation import takes_gzip, wants_openmetrics

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

THREAD_NAME = "torchotel-scrape"
POLL_S = 0.1
"""How long `close` waits for the loop to see it."""
REQUEST_S = 10.0
"""A client whose request and answer take longer, all in all, is cut off."""
MOST_CONNECTIONS = 16
"""Each is a thread. Beyond that, the connection that has waited longest without a whole request is closed."""
MOST_HEADER = 1000
"""Characters that are looked at of what a client would like."""
PATHS = ("/metrics", "/")
METHODS = ("GET", "HEAD")
SERVER_NAME = "torchotel"


class ScrapeServer:
    """Serve metrics until `close`; as text or OpenMetrics, compressed or not, as the client asks.

    Args:
        write: Gives the whole answer, as OpenMetrics or as text, or None where it can't.
        listening: Socket that clients connect to.

    Raises:
        RuntimeError: No thread can be started, as where the interpreter ends.
    """

    def __init__(self, write: Callable[[bool], bytes | None], listening: socket.socket) -> None:
        self._server = _Server(listening)
        self._server.set_app(_application(write, local=is_loopback(self._server.server_name)))
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_S,), name=THREAD_NAME, daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Close the socket, cut off who is still connected, and end the threads."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._server.cut_off()


def _application(write: Callable[[bool], bytes | None], *, local: bool) -> WSGIApplication:
    one_at_a_time = threading.Lock()  # so that many clients take no more of the GIL than one

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
        server = ("Server", SERVER_NAME)  # the default names the version of Python
        refusal = _refusal(environ, local=local)
        if refusal is not None:
            status, text = refusal
            start_response(
                status, [server, ("Content-Type", "text/plain; charset=utf-8"), ("Allow", ", ".join(METHODS))]
            )
            return [text.encode()]
        openmetrics = wants_openmetrics(environ.get("HTTP_ACCEPT", "")[:MOST_HEADER])
        with one_at_a_time:
            body = write(openmetrics)
        if body is None:
            start_response("500 Internal Server Error", [server])
            return []
        headers = [server, ("Content-Type", OPENMETRICS if openmetrics else TEXT), ("Vary", "Accept, Accept-Encoding")]
        if takes_gzip(environ.get("HTTP_ACCEPT_ENCODING", "")[:MOST_HEADER]):
            body = gzip.compress(body, compresslevel=1)  # 25 times smaller all the same
            headers.append(("Content-Encoding", "gzip"))
        start_response("200 OK", [*headers, ("Content-Length", str(len(body)))])
        return [body] if environ["REQUEST_METHOD"] == "GET" else []

    return answer


def _refusal(environ: WSGIEnvironment, *, local: bool) -> tuple[str, str] | None:
    """Say why a request gets no metrics; nothing of it is repeated."""
    if environ["REQUEST_METHOD"] not in METHODS:
        return "405 Method Not Allowed", ""
    if environ.get("PATH_INFO") not in PATHS:
        return "404 Not Found", "Metrics are at /metrics.\n"
    if local and not names_this_machine(environ.get("HTTP_HOST", "")):
        return "403 Forbidden", "Metrics of this machine are read as http://localhost or by its address.\n"
    return None


class _Handler(WSGIRequestHandler):
    server: _Server

    def parse_request(self) -> bool:
        """Protect the connection from eviction once its request was read."""
        whole = super().parse_request()
        self.server.request_read(self.connection)
        return whole

    def version_string(self) -> str:
        """Name the server in error responses, without the version of Python."""
        return SERVER_NAME

    def log_message(self, *args: object) -> None:
        """Log nothing."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, listening: socket.socket) -> None:
        self._since_s: dict[socket.socket, float] = {}
        self._unread: dict[socket.socket, None] = {}
        """Connections whose request has not been read, the oldest first."""
        self._connected: dict[socket.socket, threading.Thread] = {}
        super().__init__(listening.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()  # that of its own
        self.socket = listening
        # HTTPServer would ask the DNS for our name, for seconds where that is down.
        self.server_name, self.server_port, *_ = listening.getsockname()
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._since_s) >= MOST_CONNECTIONS and not self._evict():
            self.shutdown_request(request)
            return
        self._since_s[request] = time.monotonic()
        self._unread[request] = None
        super().process_request(request, client_address)

    def request_read(self, request: Any) -> None:
        self._unread.pop(request, None)

    def _evict(self) -> bool:
        """Close the oldest connection without a whole request: Prometheus sends its own at once.

        Without this, a few clients that connect and send nothing would keep Prometheus out.
        """
        for request in list(self._unread):
            with contextlib.suppress(KeyError):  # its thread has read the request meanwhile
                del self._unread[request]
                self._since_s.pop(request, None)
                _cut_off(request)
                return True
        return False

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self._since_s.pop(request, None)
        self._unread.pop(request, None)

    def service_actions(self) -> None:
        """Cut off who takes too long; called at least every POLL_S. A limit for each wait would let them drip."""
        for request, since_s in list(self._since_s.items()):
            if time.monotonic() - since_s > REQUEST_S:
                _cut_off(request)

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
            _cut_off(request)
            thread.join(1)


def _cut_off(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)
