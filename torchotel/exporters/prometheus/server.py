"""HTTP server of the scrape endpoint."""

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
from typing import TYPE_CHECKING, Any, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client.exposition import choose_encoder, gzip_accepted

from torchotel._limits import MAX_CONNECTIONS
from torchotel.config.otlp_endpoint import is_loopback
from torchotel.exporters.prometheus.exposition import OPENMETRICS, TEXT

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment


def wants_openmetrics(accept: str) -> bool:
    """Return whether prometheus_client responds to this Accept header with OpenMetrics."""
    try:
        _, content_type = choose_encoder(accept)
    except TypeError:  # prometheus_client 0.26 raises on a malformed version
        return False
    return content_type.startswith("application/openmetrics-text")


_PORT = re.compile(r":\d*$")
_PRIVATE = (".localhost", ".local", ".internal", ".home.arpa")
"""Suffixes of host names that cannot be registered."""


def names_this_machine(host: str) -> bool:
    """Return whether a Host header can be that of a client of this machine, against DNS rebinding.

    With DNS rebinding, the name of an open web page resolves to 127.0.0.1, so that its script can read local servers.
    The Host header of these requests is a name that can be registered.
    """
    name = _PORT.sub("", host).strip("[]").rstrip(".").lower()
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "." not in name or name.endswith(_PRIVATE)
    return True


THREAD_NAME = "torchotel-scrape"
POLL_S = 0.1
"""Interval at which the server notices `close`."""
REQUEST_S = 10.0
"""Time for a request and its response, after which the connection is closed."""
MAX_HEADER = 1000
"""Characters of an Accept or Accept-Encoding header that are parsed."""
PATHS = ("/metrics", "/")
METHODS = ("GET", "HEAD")
SERVER_NAME = "torchotel"


class ScrapeServer:
    """Serve metrics until `close`, as text or OpenMetrics, with compression if the client accepts it.

    Args:
        write: Returns the response as OpenMetrics or text, or None on failure.
        listening: Listening socket.

    Raises:
        RuntimeError: No thread can be started; the interpreter may be ending.
    """

    def __init__(self, write: Callable[[bool], bytes | None], listening: socket.socket) -> None:
        self._server = _Server(listening)
        self._server.set_app(_application(write, local=is_loopback(self._server.server_name)))
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_S,), name=THREAD_NAME, daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Close the socket and all connections, and end the threads."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._server.close_connections()


def _application(write: Callable[[bool], bytes | None], *, local: bool) -> WSGIApplication:
    one_at_a_time = threading.Lock()  # many clients take no more of the GIL than one

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
        server = ("Server", SERVER_NAME)  # the default shows the version of Python
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
            body = gzip.compress(body, compresslevel=1)  # 25 times smaller even at level 1
            headers.append(("Content-Encoding", "gzip"))
        start_response("200 OK", [*headers, ("Content-Length", str(len(body)))])
        return [body] if environ["REQUEST_METHOD"] == "GET" else []

    return answer


def _refusal(environ: WSGIEnvironment, *, local: bool) -> tuple[str, str] | None:
    """Return status and text of the refusal of a request, without any text of the request; None: it is accepted."""
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
        self.socket.close()  # the one that the base class has created
        self.socket = listening
        # HTTPServer would resolve the host name, which takes seconds if the DNS is down.
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
        """Close the oldest connection without a whole request; Prometheus sends requests at once.

        Otherwise a few clients that connect and send nothing would block Prometheus.
        """
        for request in list(self._unread):
            with contextlib.suppress(KeyError):  # its thread has just read the request
                del self._unread[request]
                self._since_s.pop(request, None)
                _close(request)
                return True
        return False

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self._since_s.pop(request, None)
        self._unread.pop(request, None)

    def service_actions(self) -> None:
        """Close connections that take too long; called at least every POLL_S. A timeout per read is no bound."""
        for request, since_s in list(self._since_s.items()):
            if time.monotonic() - since_s > REQUEST_S:
                _close(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        thread = threading.current_thread()
        thread.name = THREAD_NAME
        self._connected[request] = thread
        try:
            super().process_request_thread(request, client_address)
        finally:
            del self._connected[request]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: a client has closed its connection."""

    def close_connections(self) -> None:
        for request, thread in list(self._connected.items()):
            _close(request)
            thread.join(1)


def _close(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


BACKLOG = 5
"""Connections that may wait to be accepted."""


class Listener:
    """Listen on a port; clients that connect before `serve` wait.

    Args:
        listening: A listening socket.
    """

    def __init__(self, listening: socket.socket) -> None:
        self._socket = listening
        self.port: int = self._socket.getsockname()[1]
        self._server: ScrapeServer | None = None
        self._closed = False
        self._lock = threading.Lock()

    @classmethod
    def open(cls, host: str, port: int) -> Self:
        """Open a port.

        Args:
            host: Address to listen on.
            port: Port; 0: any free port.

        Raises:
            OSError: The address cannot be used.
            UnicodeError: The host cannot be encoded.
        """
        name = host.encode() if host.isascii() else host  # bytes: for a string, Python imports the IDNA codec
        family, *_, address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # `::` also listens on IPv4
        return cls(socket.create_server((str(address[0]), port), family=family, backlog=BACKLOG, dualstack_ipv6=both))

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._socket.fileno()

    def serve(self, write: Callable[[bool], bytes | None]) -> None:
        """Start to respond to requests.

        Args:
            write: Returns the response as OpenMetrics or text, or None on failure.

        Raises:
            RuntimeError: No thread can be started, and the interpreter is not ending.
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
        """Close the port and all connections, and end the threads."""
        with self._lock:
            self._closed = True
        if self._server is not None:
            self._server.close()
        self._socket.close()

    def disable_after_fork(self) -> None:
        """Close the port in a forked child, which would keep it open."""
        self._socket.close()
