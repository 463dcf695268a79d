"""The HTTP server that answers scrapes."""

from __future__ import annotations

import contextlib
import gzip
import ipaddress
import re
import socket
import threading
import time
from collections.abc import Callable
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client.exposition import choose_encoder, gzip_accepted

from torchotel._limits import MAX_CONNECTIONS
from torchotel.config.otlp_endpoint import is_loopback
from torchotel.exporters.prometheus.exposition import OPENMETRICS, TEXT

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment


def wants_openmetrics(accept: str) -> bool:
    """Return whether prometheus_client answers this Accept header with OpenMetrics rather than text."""
    try:
        _, content_type = choose_encoder(accept)
    except TypeError:  # prometheus_client 0.26 compares numbers with the text of a malformed version
        return False
    return content_type.startswith("application/openmetrics-text")


_PORT = re.compile(r":\d*$")
_PRIVATE = (".localhost", ".local", ".internal", ".home.arpa")
"""Ends of names that nobody can register."""


def names_this_machine(host: str) -> bool:
    """Tell whether a Host header could be that of a client which means this machine.

    A web page can let its own name lead to 127.0.0.1 once it is open (DNS rebinding), and its script then reads what
    is served there; but its requests carry that name, which is one that can be registered.
    """
    name = _PORT.sub("", host).strip("[]").rstrip(".").lower()
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "." not in name or name.endswith(_PRIVATE)
    return True


THREAD_NAME = "torchotel-scrape"
POLL_S = 0.1
"""How long `close` waits for the loop to see it."""
REQUEST_S = 10.0
"""A client whose request and answer take longer, all in all, is cut off."""
MAX_HEADER = 1000
"""Characters of an Accept or Accept-Encoding header that are read."""
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
        openmetrics = wants_openmetrics(environ.get("HTTP_ACCEPT", "")[:MAX_HEADER])
        with one_at_a_time:
            body = write(openmetrics)
        if body is None:
            start_response("500 Internal Server Error", [server])
            return []
        headers = [server, ("Content-Type", OPENMETRICS if openmetrics else TEXT), ("Vary", "Accept, Accept-Encoding")]
        if gzip_accepted(environ.get("HTTP_ACCEPT_ENCODING", "")[:MAX_HEADER]):
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
        if len(self._since_s) >= MAX_CONNECTIONS and not self._evict():
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


WAITING = 5
"""Clients that may wait until they are answered."""


class Listener:
    """Listen on a port; a client that connects before `serve` waits.

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
        """Answer from now on.

        Args:
            write: Gives the whole answer, as OpenMetrics or as text, or None where it can't.

        Raises:
            RuntimeError: No thread can be started; not where the program ends, for nobody is to be answered any more.
            OSError: There are too many open files.
        """
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

    def disable_after_fork(self) -> None:
        """Close this process's copy of the port: a forked child would keep it open."""
        self._socket.close()
