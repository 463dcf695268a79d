"""A real OTLP/HTTP receiver on loopback."""

import gzip
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple, cast

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Answer(NamedTuple):
    """What the receiver says instead of its plain 200."""

    status: int
    headers: Mapping[str, str] = {}
    body: bytes = b""


class Received(NamedTuple):
    """One request, whatever it was answered."""

    path: str
    headers: Mapping[str, str]
    message: ExportTraceServiceRequest
    time_s: float
    """Of `time.monotonic()`."""

    def spans(self) -> list[Span]:
        """Give the spans of all resources and scopes."""
        scopes = [scope for resource in self.message.resource_spans for scope in resource.scope_spans]
        return [span for scope in scopes for span in scope.spans]


class Pushed(NamedTuple):
    """One request with metrics."""

    headers: Mapping[str, str]
    message: ExportMetricsServiceRequest


class Receiver(ThreadingHTTPServer):
    """Keep all that comes; answer with what `answers` holds first, then with 200."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1/traces"
        self.always = Answer(200)
        """What is said once there is nothing else to say."""
        self.may_answer = threading.Event()
        """Cleared: every answer waits."""
        self.may_answer.set()
        self.dead = False
        """Hangs up on connections that are open still."""
        self.answers: deque[Answer] = deque()
        self.requests: list[Received] = []
        """All requests, in the order of their coming."""
        self.spans: list[Span] = []
        """Spans of the requests that were answered with 2xx."""
        self.pushed: list[Pushed] = []
        """Requests with metrics, which are kept apart."""
        self.push_answers: deque[Answer] = deque()
        """What they are answered first, before 200."""
        self._changed = threading.Condition()

    def keep(self, pushed: Pushed) -> Answer:
        """Keep a request with metrics and choose its answer."""
        with self._changed:
            self.pushed.append(pushed)
            self._changed.notify_all()
            return self.push_answers.popleft() if self.push_answers else self.always

    def wait_for_pushed(self, n_requests: int, timeout_s: float = 10.0) -> list[Pushed]:
        """Give the requests with metrics when there are `n_requests` of them."""
        with self._changed:
            came = self._changed.wait_for(lambda: len(self.pushed) >= n_requests, timeout_s)
            assert came, f"{len(self.pushed)} of {n_requests} requests with metrics came in {timeout_s} s"
            return list(self.pushed)

    def take(self, received: Received) -> Answer:
        """Keep a request and choose its answer."""
        with self._changed:
            answer = self.answers.popleft() if self.answers else self.always
            self.requests.append(received)
            if 200 <= answer.status < 300:
                self.spans += received.spans()
            self._changed.notify_all()
            return answer

    def wait_for(self, n_spans: int, timeout_s: float = 10.0) -> list[Span]:
        """Give the accepted spans when there are `n_spans` of them."""
        with self._changed:
            came = self._changed.wait_for(lambda: len(self.spans) >= n_spans, timeout_s)
            assert came, f"{len(self.spans)} of {n_spans} spans came in {timeout_s} s"
            return list(self.spans)

    def wait_for_requests(self, n_requests: int, timeout_s: float = 10.0) -> list[Received]:
        """Give the requests when there are `n_requests` of them."""
        with self._changed:
            came = self._changed.wait_for(lambda: len(self.requests) >= n_requests, timeout_s)
            assert came, f"{len(self.requests)} of {n_requests} requests came in {timeout_s} s"
            return list(self.requests)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:  # the name that http.server calls
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        server = cast("Receiver", self.server)
        if server.dead:
            self.close_connection = True
            return
        answer = self._take(body)
        server.may_answer.wait()
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def _take(self, body: bytes) -> Answer:
        server = cast("Receiver", self.server)
        if self.path == "/v1/metrics":
            return server.keep(Pushed(dict(self.headers), ExportMetricsServiceRequest.FromString(body)))
        message = ExportTraceServiceRequest.FromString(body)
        return server.take(Received(self.path, dict(self.headers), message, time.monotonic()))

    def log_message(self, *args: object) -> None:
        """Say nothing."""


def rejected(spans: int, reason: str) -> Answer:
    """Make the answer of an endpoint that takes a request without some of its spans."""
    response = ExportTraceServiceResponse()
    response.partial_success.rejected_spans = spans
    response.partial_success.error_message = reason
    return Answer(200, {"Content-Type": "application/x-protobuf"}, response.SerializeToString())


@contextmanager
def receiver(port: int = 0) -> Iterator[Receiver]:
    """Run a receiver."""
    server = Receiver(port)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
