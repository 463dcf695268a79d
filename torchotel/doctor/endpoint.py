"""The endpoint: whether it can be reached, speaks OTLP and takes a span."""

import time
from collections.abc import Iterator
from importlib import metadata
from typing import Any, NamedTuple

import requests
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from requests.utils import DEFAULT_CA_BUNDLE_PATH, get_environ_proxies, select_proxy

from torchotel._config import Config
from torchotel._receiver import Receiver
from torchotel.doctor import clock, testspan, tls
from torchotel.doctor.answers import judge
from torchotel.doctor.finding import Finding, Level, failed, ok
from torchotel.doctor.network import Address, address_of, within
from torchotel.doctor.reach import reach, who_is_there
from torchotel.doctor.testspan import TestSpan
from torchotel.doctor.trouble import Trouble, foreign
from torchotel.exporters.otlp.http_transport import Answer, HttpTransport
from torchotel.exporters.otlp.transport import without_credentials

SUBJECT = "endpoint"
LIMIT_S = 5.0
"""Longest wait in each step on the way to an endpoint."""
MOST_TIMEOUT_S = 10.0
"""Longest wait for its answer, where the configured timeout is longer."""

_OTHERS = {
    "gRPC": "gRPC is spoken there. OTLP over HTTP has another port, mostly 4318; or set protocol to grpc.",
    "TLS": "TLS is spoken there: name the endpoint with https:// instead of http://.",
}
_SILENT = "Something listens there that is no receiver of OTLP over HTTP, or it hangs: its log may say more."


class _Request(NamedTuple):
    """What is sent, and what should be answered."""

    subject: str
    receiver: Receiver
    body: bytes
    response: Any
    """OTLP's message type of the answer."""


def check(config: Config) -> Iterator[Finding]:
    """Send a test span where traces go, and an empty request where metrics are pushed."""
    if config.traces_exporter == "otlp":
        yield from _check_traces(config)
    else:
        yield ok(SUBJECT, f"no traces are sent anywhere: traces_exporter is {config.traces_exporter}")
    if "otlp" in config.metrics_exporter:
        yield from _examine(_Request("metrics", config.receiver("metrics"), b"", ExportMetricsServiceResponse))


def _check_traces(config: Config) -> Iterator[Finding]:
    span, receiver = testspan.make(config, metadata.version("torchotel")), config.receiver("traces")
    came = False
    for finding in _examine(_Request(SUBJECT, receiver, span.body, ExportTraceServiceResponse)):
        came = finding.subject == SUBJECT and finding.level is not Level.FAILED
        yield finding
        if came:
            yield ok("test span", f"trace id {span.trace_id}", _where_to_look(receiver, span))


def _examine(request: _Request) -> Iterator[Finding]:
    receiver = request.receiver
    files = list(tls.check_files(receiver))
    yield from files
    if any(finding.level is Level.FAILED for finding in files):
        yield failed(request.subject, "not called, since its TLS files cannot be used", "See above.")
        return
    try:
        yield from _call(request)
    except Trouble as trouble:
        yield failed(request.subject, trouble.text, trouble.advice)


def _call(request: _Request) -> Iterator[Finding]:
    receiver = request.receiver
    address = address_of(receiver.endpoint)
    proxy = select_proxy(receiver.endpoint, get_environ_proxies(receiver.endpoint, no_proxy=None))
    if proxy is None:
        reach(address, LIMIT_S)
        if address.tls:
            yield from tls.check_server(address, receiver, _authorities(receiver), LIMIT_S)
    sent_s = time.time()
    answer = _post(request, address, proxy)
    difference = clock.compare(answer.headers.get("Date"), sent_s, time.time())
    yield judge(request.subject, answer, request.response, receiver)
    if difference is not None:
        yield difference


def _authorities(receiver: Receiver) -> str:
    """Find what `requests` trusts: the configured file, the variables that it reads, or its own list."""
    found = requests.Session().merge_environment_settings(
        receiver.endpoint, {}, stream=True, verify=receiver.certificate or True, cert=None
    )["verify"]
    return str(DEFAULT_CA_BUNDLE_PATH if found is True else found)


def _post(request: _Request, address: Address, proxy: str | None) -> Answer:
    receiver = request.receiver
    transport = HttpTransport(receiver, version=metadata.version("torchotel"))
    limit_s = min(receiver.timeout_s, MOST_TIMEOUT_S)
    shown = without_credentials(receiver.endpoint)
    try:
        return within(2 * limit_s, lambda: transport.ask(transport.pack(request.body), limit_s))
    except Exception as error:  # noqa: BLE001 - whatever comes of it is what is asked for
        what = foreign(_root(error), receiver.headers)
        if proxy is not None:
            text = f"{shown} could not be called through the proxy {without_credentials(proxy)}: {what}"
            advice = "HTTP_PROXY and HTTPS_PROXY hold for telemetry too: set NO_PROXY to the endpoint's host."
            raise Trouble(text, advice) from None
        other = who_is_there(address, LIMIT_S)
        if other:
            raise Trouble(f"{shown} gave no answer of HTTP", _OTHERS[other]) from None
        if isinstance(error, TimeoutError | requests.Timeout):
            raise Trouble(f"{shown} took the request and gave no answer in {limit_s:g} s", _SILENT) from None
        raise Trouble(f"{shown} gave no answer of OTLP: {what}", _SILENT) from None
    finally:
        transport.close()


def _root(error: BaseException) -> BaseException:
    """Find the shortest words: `requests` wraps urllib3, which wraps the socket's own."""
    while isinstance(inner := error.__cause__ or error.__context__, Exception):
        error = inner
    return error


def _where_to_look(receiver: Receiver, span: TestSpan) -> str:
    host = address_of(receiver.endpoint).host
    return (
        f"In Jaeger: http://{host}:16686/trace/{span.trace_id}; in Grafana: Explore, Tempo, that id.\n"
        f"Its service is {span.service}, its only span {testspan.NAME}."
    )
