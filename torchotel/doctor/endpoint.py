"""Check the OTLP endpoint, and send it a test span."""

import secrets
import time
from collections.abc import Iterator
from typing import NamedTuple

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from torchotel._utils.installation import package_version
from torchotel.config.config import Config
from torchotel.config.otlp_endpoint import OtlpEndpoint, is_loopback
from torchotel.doctor import otlp_grpc, otlp_http, tls
from torchotel.doctor.network import Request
from torchotel.doctor.result import CheckFailed, Finding, Level, failed, ok
from torchotel.exporters.otlp.encoder import Envelope, SpanEncoder
from torchotel.exporters.otlp.grpc import read_target
from torchotel.exporters.otlp.transport import METRICS, TRACES
from torchotel.stack.manager import running_stack
from torchotel.stack.services import serves_web_ui
from torchotel.tracing.resource import describe_process
from torchotel.tracing.span import Span, SpanTemplate, Trace

NAME = "torchotel.doctor"
_DURATION_NS = 1_000_000


class TestSpan(NamedTuple):
    """An encoded request with one span, and the ids to search for."""

    trace_id: str
    service: str
    body: bytes


def make_test_span(config: Config, version: str) -> TestSpan:
    """Return a trace of one span that ends now."""
    resource = describe_process(config.service_name, "torchotel-doctor", {})
    trace_id, now_ns = secrets.randbits(128), time.time_ns()
    template = SpanTemplate(NAME, {"torchotel.doctor": "sent by torchotel doctor to see whether spans arrive"})
    span = Span(template, secrets.randbits(63) + 1, 0, now_ns - _DURATION_NS, now_ns)
    spans = SpanEncoder().encode(Trace(trace_id, [span], {}))
    body = Envelope(resource, version).wrap([spans])
    return TestSpan(f"{trace_id:032x}", str(resource["service.name"]), body)


SUBJECT = "endpoint"


def check(config: Config) -> Iterator[Finding]:
    """Send a test span to the traces endpoint, and an empty request to the metrics endpoint."""
    version = package_version()
    if config.traces_exporter == "otlp":
        yield from _check_traces(config, version)
    else:
        yield ok(SUBJECT, f"no traces are sent: traces_exporter is {config.traces_exporter}")
    if "otlp" in config.metrics_exporter:
        otlp_endpoint = config.otlp_endpoint("metrics")
        yield from _check_signal(Request("metrics", otlp_endpoint, METRICS, b"", ExportMetricsServiceResponse, version))


def _check_traces(config: Config, version: str) -> Iterator[Finding]:
    span, otlp_endpoint = make_test_span(config, version), config.otlp_endpoint("traces")
    for finding in _check_signal(
        Request(SUBJECT, otlp_endpoint, TRACES, span.body, ExportTraceServiceResponse, version)
    ):
        yield finding
        if finding.subject == SUBJECT and finding.level is not Level.FAILED:
            yield ok("test span", f"trace id {span.trace_id}", _search_advice(otlp_endpoint, span))


def _check_signal(request: Request) -> Iterator[Finding]:
    files = list(tls.check_files(request.otlp_endpoint))
    yield from files
    if any(finding.level is Level.FAILED for finding in files):
        yield failed(request.subject, "skipped: fix the certificate files above first", "")
        return
    client = otlp_grpc if request.otlp_endpoint.protocol == "grpc" else otlp_http
    try:
        yield from client.call(request)
    except CheckFailed as failure:
        # opentelemetry-instrument's distro sets this protocol without being asked.
        protocol = " (the protocol is grpc)" if client is otlp_grpc and "gRPC" not in failure.text else ""
        yield failed(request.subject, failure.text + protocol, failure.advice)


def _search_advice(otlp_endpoint: OtlpEndpoint, span: TestSpan) -> str:
    address = read_target(otlp_endpoint.endpoint, insecure=otlp_endpoint.insecure).address
    host = "localhost" if "/" in address else address.rpartition(":")[0]  # a path is a Unix socket
    stack = running_stack() if is_loopback(host) else None
    advice = f"Search your backend for this id. In a Jaeger on that host: http://{host}:16686/trace/{span.trace_id}"
    if stack is not None:
        jaeger = f"http://localhost:{stack.ports.jaeger}"
        has_web_ui = all(serves_web_ui(server) for server in stack.servers if server.name == "jaeger")
        advice = f"In Jaeger: {jaeger}/trace/{span.trace_id}"
        if not has_web_ui:
            advice = f"This Jaeger was built without pages: {jaeger}/api/traces/{span.trace_id}"
    return f"{advice}\nIts service is {span.service}, its only span {NAME}."
