"""An OTLP/HTTP receiver that counts spans in a separate process, so that its work is not measured."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self, cast
from urllib.request import urlopen

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Sink:
    """Runs the receiver until the block ends."""

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "benchmarks.sink"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.endpoint = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        self.traces = f"{self.endpoint}/v1/traces"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # closes its input, which ends it

    def count(self) -> tuple[int, int]:
        """Return the number of spans and bytes received since the last call."""
        with urlopen(f"{self.endpoint}/count") as answer:  # noqa: S310  # this class's receiver, on loopback
            spans, wire_bytes = json.load(answer)
            return spans, wire_bytes


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[tuple[bytes, bool]] = []

    def count(self) -> tuple[int, int]:
        """Decode and count the requests. No measurement runs during this call."""
        requests, self.requests = self.requests, []
        spans = sum(_spans(gzip.decompress(body) if packed else body) for body, packed in requests)
        return spans, sum(len(body) for body, _ in requests)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:  # the name that http.server calls
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path != "/v1/traces":
            self._answer(b"")
            return
        packed = self.headers.get("Content-Encoding") == "gzip"
        cast("_Server", self.server).requests.append((body, packed))
        self._answer(b"")

    def do_GET(self) -> None:  # the name that http.server calls
        self._answer(json.dumps(cast("_Server", self.server).count()).encode())

    def log_message(self, *args: object) -> None:
        """Log nothing."""

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _spans(body: bytes) -> int:
    request = ExportTraceServiceRequest.FromString(body)
    return sum(len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans)


def main() -> None:
    """Serve until standard input is closed. The first line of output is the port."""
    server = _Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()
    server.shutdown()


if __name__ == "__main__":
    main()
