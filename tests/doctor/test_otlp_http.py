"""Test the doctor's check of HTTP endpoints: each cause of a failure has its own finding and advice."""

import socket
import ssl

import pytest
import trustme
from support.doctor_results import examined, saying
from support.otlp_grpc_receiver import grpc_receiver
from support.otlp_http_receiver import Answer, Receiver, rejected

from torchotel.config.config import Config
from torchotel.doctor import endpoint
from torchotel.doctor.result import Level
from torchotel.exporters.otlp.http import MAX_ANSWER_BYTES

OTLP = {"Content-Type": "application/x-protobuf"}
WARNED = b"\x0a\x06\x12\x04slow"
"""An ExportTraceServiceResponse without rejected spans and with the message "slow"."""


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def base(server: Receiver) -> str:
    return server.url.removesuffix("/v1/traces")


def test_sends_a_span_and_tells_its_trace_id(server: Receiver, base: str) -> None:
    server.answers.append(Answer(200, OTLP))
    findings = list(endpoint.check(Config(endpoint=base, service_name="mine")))
    assert {finding.level for finding in findings} == {Level.OK}
    (span,) = server.spans
    assert span.name == "torchotel.doctor"
    (told,) = (finding for finding in findings if finding.subject == "test span")
    assert told.text == f"trace id {span.trace_id.hex()}"
    assert f"http://127.0.0.1:16686/trace/{span.trace_id.hex()}" in told.advice
    assert "Its service is mine" in told.advice


@pytest.mark.parametrize(
    ("answer", "level", "text", "advice"),
    [
        (Answer(200, OTLP), Level.OK, "accepts OTLP", ""),
        (Answer(202, OTLP), Level.OK, "accepts OTLP", ""),
        (Answer(200), Level.WARNING, "may not be an OTLP receiver", "Check that the test span arrived"),
        (Answer(200, OTLP, WARNED), Level.WARNING, "accepted the request with a warning: slow", "gave this reason"),
        (rejected(1, "quota"), Level.FAILED, "rejected its content: quota", "gave this reason"),
        (Answer(200, {"Content-Type": "text/html"}, b"<p>"), Level.FAILED, "200 with text/html", "Another server"),
        (Answer(200, OTLP, b"\xff" * 9), Level.FAILED, "not an OTLP response", "Another server listens there"),
        (Answer(302, {"Location": "http://u:p@x/y"}), Level.FAILED, "302", "target of the redirect: http://x/y"),
        (Answer(400, {}, b"bad wire"), Level.FAILED, "answered 400 Bad Request: bad wire", "could not read"),
        (Answer(401), Level.FAILED, "answered 401 Unauthorized", "OTEL_EXPORTER_OTLP_HEADERS"),
        (Answer(403), Level.FAILED, "answered 403 Forbidden", "Headers that were sent: none"),
        (Answer(404), Level.FAILED, "answered 404 Not Found", "no OTLP receiver at /v1/traces"),
        (Answer(405), Level.FAILED, "answered 405", "16686 is Jaeger's page"),
        (Answer(415), Level.FAILED, "answered 415", "does not accept protobuf"),
        (Answer(429), Level.FAILED, "answered 429", "retried"),
        (Answer(500), Level.FAILED, "answered 500", "endpoint's log"),
        (Answer(200, OTLP, bytes(2 * MAX_ANSWER_BYTES)), Level.FAILED, "not an OTLP response", "Another server"),
    ],
)
def test_tells_answers_apart(server: Receiver, base: str, answer: Answer, level: Level, text: str, advice: str) -> None:
    server.answers.append(answer)
    found = examined(base)
    assert found.level is level
    assert text in found.text
    assert advice in found.advice


@pytest.mark.parametrize(
    ("path", "verbatim", "advice"),
    [
        ("", True, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is used unchanged, so it must end in /v1/traces"),
        ("/v1/traces", False, "is a base URL, to which /v1/traces is appended: remove that path"),
    ],
)
def test_knows_the_usual_mistakes_with_paths(
    server: Receiver, base: str, path: str, *, verbatim: bool, advice: str
) -> None:
    server.answers.append(Answer(404))
    assert advice in examined(base + path, own_path=verbatim).advice


def test_names_headers_and_never_their_values(server: Receiver, base: str) -> None:
    """Header values are not printed, even if the endpoint's response contains them."""
    server.answers.append(Answer(401, {}, b"bad token sesame in Bearer sesame\x1b[31m"))
    headers = {"authorization": "Bearer sesame"}
    findings = list(endpoint.check(Config(endpoint=base, headers=headers)))
    (found,) = (finding for finding in findings if finding.subject == "endpoint")
    assert found.text.endswith("answered 401 Unauthorized: bad token ... in ...?[31m")
    assert "Headers that were sent: authorization." in found.advice
    assert "sesame" not in repr(findings)


def test_compares_clocks_by_the_date_of_the_answer(server: Receiver, base: str) -> None:
    server.answers.append(Answer(200, OTLP))
    assert examined(base, "clock").text == "within a second of the endpoint's clock"
    page = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nDate: Sat, 01 Jan 2000 00:00:00 GMT\r\n\r\n"
    with saying(page) as old:
        found = examined(old, "clock")
    assert found.level is Level.WARNING
    assert "s ahead of the endpoint's" in found.text


def test_tells_that_nothing_listens() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        found = examined(f"http://127.0.0.1:{held.getsockname()[1]}")
    assert found.level is Level.FAILED
    assert "nothing listens at 127.0.0.1:" in found.text
    assert "Start a Collector or Jaeger" in found.advice


def test_tells_that_a_name_is_not_known() -> None:
    found = examined("http://nosuch.invalid:4318")
    assert found.level is Level.FAILED
    assert "nosuch.invalid" in found.text
    assert "DNS" in found.advice


def test_tells_a_silent_server() -> None:
    with saying(b"") as url:
        found = examined(url, timeout_s=0.2)
    assert found.level is Level.FAILED
    assert "accepted the request but did not answer within 0.2 s" in found.text


def test_does_not_wait_for_a_server_that_never_comes_to_an_end() -> None:
    """The limit applies to the whole response, even if each byte arrives in time."""
    with saying(b"HTTP/1.1 200 OK\r\nX: ", then_s=0.1) as url:
        found = examined(url, timeout_s=0.3)
    assert found.level is Level.FAILED
    assert "accepted the request but did not answer" in found.text


def test_tells_an_address_that_takes_no_connection() -> None:
    """An address that drops packets is reported; a full backlog drops them, as a firewall does."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        held = [socket.socket() for _ in range(8)]
        for waiting in held:
            waiting.settimeout(0)
            waiting.connect_ex(address)
        found = examined(f"http://127.0.0.1:{address[1]}", timeout_s=0.3)
        for waiting in held:
            waiting.close()
    assert found.level is Level.FAILED
    assert "did not answer within 0.3 s" in found.text
    assert "firewall" in found.advice


def test_tells_garbage() -> None:
    with saying(b"220 mail.example.org ESMTP\r\n") as url:
        found = examined(url, timeout_s=0.5)
    assert found.level is Level.FAILED
    assert "gave no OTLP response" in found.text


def test_knows_a_grpc_port() -> None:
    with grpc_receiver() as receiver:
        found = examined(f"http://127.0.0.1:{receiver.port}")
    assert found.level is Level.FAILED
    assert "The server there uses gRPC. Use the port of OTLP over HTTP, usually 4318" in found.advice


@pytest.fixture
def tls_url(server: Receiver) -> str:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # failing handshakes are expected
    return f"127.0.0.1:{server.server_port}"


def test_knows_a_port_of_tls(tls_url: str) -> None:
    found = examined(f"http://{tls_url}")
    assert found.level is Level.FAILED
    assert "use https://" in found.advice


def test_names_the_proxy_that_is_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing proxy is named; proxies apply to endpoints on other machines."""
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        monkeypatch.setenv("http_proxy", f"http://me:secret@127.0.0.1:{held.getsockname()[1]}")
        found = examined("http://receiver.invalid")
    assert found.level is Level.FAILED
    assert "through the proxy http://127.0.0.1:" in found.text
    assert "NO_PROXY" in found.advice
    assert "secret" not in repr(found)


def test_calls_nobody_where_nothing_is_sent(server: Receiver, base: str) -> None:
    found = examined(base, traces_exporter="none")
    assert (found.level, server.requests) == (Level.OK, [])


def test_examines_the_endpoint_of_metrics_too(server: Receiver, base: str) -> None:
    found = examined(base, "metrics", traces_exporter="none", metrics_exporter="otlp")
    assert found.text == f"{base}/v1/metrics answered 200 without a Content-Type, so it may not be an OTLP receiver"
    (pushed,) = server.pushed
    assert not pushed.message.resource_metrics
