"""A thousand ranks, simulated: what they send to a real Collector, Jaeger and Prometheus, and what that costs there.

Run `PYTHONPATH=tests:. python -m benchmarks.many_ranks`, with the servers of `make backends`. A recorded step of the
transformer is encoded once for each rank, with the rank's own resource and its share of the trace. The figures are for
the page docs/sizing.md.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

from support import backend_servers
from support.backend_servers import RealServer
from support.jaeger_traces import JaegerApi
from support.prometheus_server import Prometheus, until

from benchmarks import workloads
from benchmarks.records import record
from torchotel._records import StepRecord
from torchotel._session import Session
from torchotel._utils.distributed import Identity
from torchotel._utils.gil import GilYielder
from torchotel._utils.installation import package_version
from torchotel.config.config import Config
from torchotel.config.otlp_endpoint import OtlpEndpoint
from torchotel.exporters.otlp.encoder import Envelope, SpanEncoder
from torchotel.exporters.otlp.http import HttpTransport
from torchotel.tracing.call_tree import CallTreeBuilder
from torchotel.tracing.ids import IdGenerator
from torchotel.tracing.resource import ProcessResource, describe_process
from torchotel.tracing.shared_trace import SharedTraces
from torchotel.tracing.span_templates import Templates
from torchotel.tracing.trace_builder import TraceBuilder

CLIENTS = 4
"""Threads that send, each for its share of the ranks."""
SCRAPES = 3
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
say = partial(print, flush=True)


class Sent(NamedTuple):
    """What the ranks sent."""

    spans: int
    plain_bytes: int
    wire_bytes: int
    traces: list[int]


class Cost(NamedTuple):
    """What a server has used."""

    cpu_s: float
    memory_mib: float


class Rank:
    """One simulated rank, which encodes the trace of a step as torchotel does.

    Args:
        number: The rank.
        ranks: The world size.
    """

    def __init__(self, number: int, ranks: int) -> None:
        identity = Identity(number, number % 8, ranks, "simulated", 0, launch="one")
        self.shared = SharedTraces(lambda: identity)
        described = {**describe_process("simulated", "simulated", {}), "host.name": f"node-{number // 8}"}
        described["service.instance.id"] = f"rank-{number}"
        self._envelope = Envelope(ProcessResource(described, lambda: identity), package_version())
        self._ids, yielder = IdGenerator(), GilYielder()
        self._builder = TraceBuilder(Templates(), Config().max_spans, yielder, self.shared)
        self._trees, self._encoder = CallTreeBuilder(yielder), SpanEncoder()

    def request(self, step: StepRecord) -> tuple[bytes, int]:
        """Return the request for a step, and the number of its spans."""
        trace_id = self.shared.trace_id(step.alignment)
        root = self._ids.start("torch.step", None, step.start_ns, trace_id=trace_id)
        trace = self._builder.build(step, self._trees.build(step), root, {})
        return self._envelope.wrap([self._encoder.encode(trace)]), len(trace.spans)


def main() -> None:
    """Measure traces, then metrics."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_ranks", description=__doc__)
    parser.add_argument("--ranks", type=int, default=1000, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="steps that are sent, all in detail (%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _measure_traces(Path(folder), options.ranks, options.steps)
        _measure_series(Path(folder), options.ranks)


def _measure_traces(folder: Path, ranks: int, steps: int) -> None:
    recorded = record(workloads.make("transformer"), 1)[0]
    every = [replace(recorded, number=number, alignment=(number, 0)) for number in range(steps)]
    ports = backend_servers.own_ports()
    jaeger = backend_servers.jaeger(folder / "jaeger", ports)
    collector = backend_servers.collector(folder / "collector", ports)
    with backend_servers.running(jaeger), backend_servers.running(collector):
        endpoint = OtlpEndpoint(f"http://127.0.0.1:{ports.otlp_http}/v1/traces")
        start_s = time.monotonic()
        with ThreadPoolExecutor(CLIENTS) as threads:
            parts = [*threads.map(partial(_send, endpoint, ranks, every), range(CLIENTS))]
        sending_s = time.monotonic() - start_s
        sent = Sent(
            sum(part.spans for part in parts),
            sum(part.plain_bytes for part in parts),
            sum(part.wire_bytes for part in parts),
            parts[0].traces,
        )
        api = JaegerApi(ports.jaeger)
        traces = [f"{trace_id:032x}" for trace_id in sent.traces]
        until(lambda: sum(len(api.spans([trace])) for trace in traces), lambda arrived: arrived == sent.spans)
        roots = sum(span.name.startswith("torch.step rank ") for span in api.spans(traces[:1]).values())
        requests = ranks * steps
        say(f"{steps} steps of {ranks} ranks: {sent.spans} spans, {sent.spans // steps} a step with {roots} roots")
        say(f"sent in {sending_s:.1f} s: {sent.spans / sending_s:.0f} spans/s, {requests / sending_s:.0f} requests/s")
        say(f"bytes of a request: {sent.plain_bytes / requests:.0f}, {sent.wire_bytes / requests:.0f} with gzip")
        for name, server in {"collector": collector, "jaeger": jaeger}.items():
            used = _used(server)
            say(f"{name}: {used.cpu_s / steps * 1e3:.0f} ms of CPU a step, {used.memory_mib:.0f} MiB at most")


def _send(endpoint: OtlpEndpoint, ranks: int, steps: Sequence[StepRecord], client: int) -> Sent:
    """Send all steps of the ranks of one client."""
    transport = HttpTransport(endpoint, version=package_version())
    own = [Rank(number, ranks) for number in range(client, ranks, CLIENTS)]
    spans = plain_bytes = wire_bytes = 0
    for step in steps:
        for rank in own:
            body, count = rank.request(step)
            packed = transport.pack(body)
            reply = transport.send(packed, None)
            assert reply.error_type is None, reply
            spans, plain_bytes, wire_bytes = spans + count, plain_bytes + len(body), wire_bytes + len(packed)
    transport.close()
    return Sent(spans, plain_bytes, wire_bytes, [own[0].shared.trace_id(step.alignment) or 0 for step in steps])


def _used(server: RealServer) -> Cost:
    """Return the CPU time of a server, and the most memory that it had."""
    fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
    status = Path(f"/proc/{server.pid}/status").read_text()
    (peak_kib,) = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")]
    return Cost((int(fields[11]) + int(fields[12])) / TICKS_PER_S, peak_kib / 1024)


def _measure_series(folder: Path, ranks: int) -> None:
    """Let a Prometheus scrape the ranks, with the series that a rank has after a detailed step."""
    text = _scraped_text()
    ports = backend_servers.own_ports()
    targets = folder / "targets"
    with ExitStack() as stack:
        port = stack.enter_context(_answering(text))
        prometheus = backend_servers.prometheus(folder / "prometheus", targets, ports)
        entries = [
            {
                "targets": [f"127.0.0.1:{port}"],
                "labels": {"job": "simulated", "instance": f"rank-{rank}", "__metrics_path__": f"/{rank}"},
            }
            for rank in range(ranks)
        ]
        (targets / "torchotel-simulated.json").write_text(json.dumps(entries))
        stack.enter_context(backend_servers.running(prometheus))
        api = Prometheus(ports.prometheus)
        scraped = f'count(sum_over_time(up{{job="simulated"}}[5m]) >= {SCRAPES})'
        until(lambda: api.query(scraped), lambda found: bool(found) and float(found[0]["value"][1]) == ranks)
        (series,) = api.query('count({job="simulated"})')
        (took,) = api.query('quantile(0.5, scrape_duration_seconds{job="simulated"})')
        used, count = _used(prometheus), int(series["value"][1])
        say(f"series: {count}, {count / ranks:.0f} of a rank; the median scrape takes {took['value'][1]} s")
        say(f"prometheus: {used.memory_mib:.0f} MiB at most, {used.cpu_s / SCRAPES:.1f} s of CPU a round of scrapes")


def _scraped_text() -> str:
    """Return what a rank shows that has trained the transformer in detail."""
    session = Session(Config(detail="all", prometheus_port=0, traces_exporter="none"), None)
    workload = workloads.make("transformer")
    for _ in range(3):
        workload.step()
    session.flush(10.0)
    with urlopen(f"http://127.0.0.1:{session.prometheus_port}/metrics") as answer:
        text: str = answer.read().decode()
    session.stop(10.0)
    return text


@contextmanager
def _answering(text: str) -> Iterator[int]:
    """Answer scrapes of all ranks, each with its own rank; yields the port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            rank = self.path.strip("/")
            body = text.replace('torch_rank="0"', f'torch_rank="{rank}"').encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


if __name__ == "__main__":
    main()
