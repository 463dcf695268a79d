"""What is said to those who connect to the scrape endpoint, and for how long they may stay.

Imported on the endpoint's thread: what it needs takes 6 ms to load.
"""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading
import time
from collections.abc import Callable
from socketserver import BaseServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from torchotel.exporters.prometheus.exposition import OPENMETRICS, TEXT
from torchotel.exporters.prometheus.hosts import is_loopback, names_this_machine
from torchotel.exporters.prometheus.negotiation import takes_gzip, wants_openmetrics

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

REQUEST_S = 10.0
"""A client whose request and answer take longer, all in all, is cut off."""
MOST_CONNECTIONS = 16
"""Each is a thread, and a Prometheus needs one: whoever comes beyond that is turned away."""
MOST_HEADER = 1000
"""Characters that are looked at of what a client would like."""
PATHS = ("/metrics", "/")
METHODS = ("GET", "HEAD")


def _application(write: Callable[[bool], bytes | None], *, local: bool) -> WSGIApplication:
    one_at_a_time = threading.Lock()  # so that many clients take no more of the GIL than one

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
        refusal = _refusal(environ, local=local)
        if refusal is not None:
            status, text = refusal
            start_response(status, [("Content-Type", "text/plain; charset=utf-8"), ("Allow", ", ".join(METHODS))])
            return [text.encode()]
        openmetrics = wants_openmetrics(environ.get("HTTP_ACCEPT", "")[:MOST_HEADER])
        with one_at_a_time:
            body = write(openmetrics)
        if body is None:
            start_response("500 Internal Server Error", [])
            return []
        headers = [("Content-Type", OPENMETRICS if openmetrics else TEXT), ("Vary", "Accept, Accept-Encoding")]
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
    def log_message(self, *args: object) -> None:
        """Say nothing."""


class Server(ThreadingMixIn, WSGIServer):
    """Answer whoever connects, each on a thread of its own.

    Args:
        listening: The port; closed with the server.
        write: As that of `ScrapeServer`.
        thread_name: Of the threads.
    """

    daemon_threads = True

    def __init__(self, listening: socket.socket, write: Callable[[bool], bytes | None], thread_name: str) -> None:
        self._since_s: dict[socket.socket, float] = {}
        self.connected: dict[socket.socket, threading.Thread] = {}
        self._thread_name = thread_name
        host, port, *_ = listening.getsockname()
        # TCPServer's makes a socket, and HTTPServer's asks the DNS for our name, for seconds where that is down.
        BaseServer.__init__(self, (host, port), _Handler)
        self.socket, self.server_name, self.server_port = listening, host, port
        self.setup_environ()
        self.set_app(_application(write, local=is_loopback(host)))

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin an answer, or turn the client away."""
        if len(self._since_s) >= MOST_CONNECTIONS:
            self.shutdown_request(request)
            return
        self._since_s[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        super().shutdown_request(request)
        self._since_s.pop(request, None)

    def service_actions(self) -> None:
        """Cut off who takes too long; called at least every POLL_S. A limit for each wait would let them drip."""
        for request, since_s in list(self._since_s.items()):
            if time.monotonic() - since_s > REQUEST_S:
                _cut_off(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, on the thread that was begun for it."""
        thread = threading.current_thread()
        thread.name = self._thread_name
        self.connected[request] = thread
        try:
            super().process_request_thread(request, client_address)
        finally:
            del self.connected[request]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that goes away is not our user's business."""

    def cut_off(self) -> None:
        """Hang up on all who are still connected."""
        for request, thread in list(self.connected.items()):
            _cut_off(request)
            thread.join(1)


def _cut_off(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)
