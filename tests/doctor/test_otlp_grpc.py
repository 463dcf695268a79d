"""Test the doctor's check of gRPC endpoints: each cause of a failure has its own finding."""

import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import trustme
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from support.doctor_results import examined, saying
from support.otlp_grpc_receiver import Refusal, grpc_receiver
from support.otlp_http_receiver import Receiver

from torchotel.config.config import Config
from torchotel.doctor import endpoint
from torchotel.doctor.result import Level


def test_sends_a_span_and_tells_its_trace_id() -> None:
    with grpc_receiver() as receiver:
        findings = list(endpoint.check(Config(endpoint=receiver.endpoint, protocol="grpc")))
        (span,) = receiver.spans
    assert [finding.subject for finding in findings] == ["endpoint", "test span"]
    assert findings[0].text == f"localhost:{receiver.port} accepts OTLP over gRPC"
    assert findings[1].text == f"trace id {span.trace_id.hex()}"
    assert "http://localhost:16686/trace/" in findings[1].advice


def partial(spans: int) -> ExportTraceServiceResponse:
    response = ExportTraceServiceResponse()
    response.partial_success.rejected_spans = spans
    response.partial_success.error_message = "quota"
    return response


@pytest.mark.parametrize(
    ("answer", "level", "text", "advice"),
    [
        (partial(1), Level.FAILED, "rejected its content: quota", "gave this reason"),
        (partial(0), Level.WARNING, "accepted the request with a warning: quota", ""),
        (
            Refusal(grpc.StatusCode.UNAUTHENTICATED),
            Level.FAILED,
            "refused the request: UNAUTHENTICATED: later",
            "were sent: key.",
        ),
        (Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, 9), Level.FAILED, "RESOURCE_EXHAUSTED", "This may be temporary"),
        (Refusal(grpc.StatusCode.INTERNAL), Level.FAILED, "INTERNAL", "endpoint's log"),
    ],
)
def test_tells_answers_apart(
    answer: Refusal | ExportTraceServiceResponse, level: Level, text: str, advice: str
) -> None:
    with grpc_receiver() as receiver:
        receiver.answers.append(answer)
        found = examined(receiver.endpoint, protocol="grpc", headers={"key": "sesame"})
    assert found.level is level
    assert text in found.text
    assert advice in found.advice
    assert "sesame" not in repr(found)


def test_knows_a_server_of_other_services() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    found = examined(f"http://127.0.0.1:{port}", protocol="grpc")
    server.stop(None).wait()
    assert "UNIMPLEMENTED" in found.text
    assert "has no OTLP service" in found.advice


def test_knows_a_port_of_http(server: Receiver) -> None:
    found = examined(f"127.0.0.1:{server.server_port}", protocol="grpc", insecure=True)
    assert found.level is Level.FAILED
    assert "The server there uses HTTP. Use the port of OTLP over gRPC, usually 4317" in found.advice


def test_knows_a_port_of_tls(server: Receiver) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # failing handshakes are expected
    found = examined(f"http://127.0.0.1:{server.server_port}", protocol="grpc")
    assert found.level is Level.FAILED
    assert "use https://" in found.advice


def test_speaks_tls(tmp_path: Path) -> None:
    authority, path = trustme.CA(), str(tmp_path / "authority.pem")
    authority.cert_pem.write_to_path(path)
    leaf = authority.issue_cert("localhost")
    pair = leaf.private_key_pem.bytes(), leaf.cert_chain_pems[0].bytes()
    with grpc_receiver("localhost:0", grpc.ssl_server_credentials([pair])) as receiver:
        taken = examined(receiver.endpoint, protocol="grpc", certificate=path)
        found = examined(receiver.endpoint, protocol="grpc")
    assert taken.text == f"localhost:{receiver.port} accepts OTLP over gRPC"
    assert "is not signed by an authority in" in found.text


def test_tells_a_silent_server() -> None:
    with saying(b"") as url:
        found = examined(url, protocol="grpc", timeout_s=0.3)
    assert found.level is Level.FAILED
    assert "DEADLINE_EXCEEDED" in found.text


def test_tells_that_nothing_listens() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        found = examined(f"http://127.0.0.1:{held.getsockname()[1]}", protocol="grpc")
    assert "nothing listens at" in found.text
    assert found.text.endswith("(the protocol is grpc)")


def test_tells_that_a_client_certificate_is_wanted(tmp_path: Path) -> None:
    authority, path = trustme.CA(), str(tmp_path / "authority.pem")
    authority.cert_pem.write_to_path(path)
    leaf = authority.issue_cert("localhost")
    pair = leaf.private_key_pem.bytes(), leaf.cert_chain_pems[0].bytes()
    credentials = grpc.ssl_server_credentials([pair], authority.cert_pem.bytes(), require_client_auth=True)
    with grpc_receiver("localhost:0", credentials) as receiver:
        found = examined(receiver.endpoint, protocol="grpc", certificate=path)
    assert found.level is Level.FAILED
    assert "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE" in found.advice
