"""TLS over both protocols: who is at the other end is verified, and the client shows a certificate where it has one."""

from pathlib import Path
from typing import Any

import pytest
from support.otlp_tls_receivers import Authority, served
from support.senders import soon

from torchotel.config.otlp_endpoint import OtlpEndpoint, OtlpProtocol
from torchotel.exporters.base import ExportCounts, ExportStats
from torchotel.exporters.otlp.sender import Sender, make_transport
from torchotel.exporters.otlp.transport import TRACES


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


def send(endpoint: str, protocol: OtlpProtocol, **certificates: Any) -> ExportCounts:
    """Send one request and say what became of it."""
    stats = ExportStats()
    transport = make_transport(OtlpEndpoint(endpoint, protocol, timeout_s=5, **certificates), TRACES, version="1.2")
    sender = Sender(transport, stats)
    sender.put(b"", 3)
    sender.shutdown(soon(10))
    return stats.read()


PROTOCOLS = pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])


@PROTOCOLS
def test_trusts_the_given_authority(authority: Authority, protocol: OtlpProtocol) -> None:
    """A server whose certificate it signed gets the spans."""
    with served(authority, protocol, mutual=False) as endpoint:
        assert send(endpoint, protocol, certificate=authority.files.authority) == ExportCounts(3, 0, {})


@PROTOCOLS
@pytest.mark.parametrize("trusted", [None, "stranger"])
def test_trusts_nobody_else(
    authority: Authority, protocol: OtlpProtocol, trusted: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that nobody known signed for gets nothing; the log names the certificate as the cause."""
    with served(authority, protocol, mutual=False) as endpoint:
        counts = send(endpoint, protocol, certificate=authority.files.stranger if trusted else None)
    assert (counts.exported, counts.dropped) == (0, 3)
    assert "certificate" in caplog.text.lower()
    assert "OTEL_EXPORTER_OTLP_CERTIFICATE" in caplog.text


@PROTOCOLS
@pytest.mark.parametrize("files", [("client", "client_key"), ("client_both", None)], ids=["two files", "one file"])
def test_shows_the_client_certificate(
    authority: Authority, protocol: OtlpProtocol, files: tuple[str, str | None]
) -> None:
    """A server that asks who is there is told; key and certificate may stand in one file."""
    certificate, key = (None if name is None else getattr(authority.files, name) for name in files)
    with served(authority, protocol, mutual=True) as endpoint:
        trusted = authority.files.authority
        counts = send(endpoint, protocol, certificate=trusted, client_certificate=certificate, client_key=key)
    assert counts == ExportCounts(3, 0, {})


@PROTOCOLS
def test_a_server_that_asks_in_vain_takes_nothing(
    authority: Authority, protocol: OtlpProtocol, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a client certificate there is no connection, and the spans are counted as dropped."""
    with served(authority, protocol, mutual=True) as endpoint:
        counts = send(endpoint, protocol, certificate=authority.files.authority)
    assert (counts.exported, counts.dropped) == (0, 3)
    assert "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE" in caplog.text


@pytest.mark.parametrize("broken", ["certificate", "client_certificate"])
@PROTOCOLS
def test_a_file_that_is_no_certificate_harms_nobody(
    authority: Authority, protocol: OtlpProtocol, broken: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What the file holds is found out on the worker, told and counted."""
    (tmp_path / "bad.pem").write_text("no certificate\n")
    with served(authority, protocol, mutual=False) as endpoint:
        files = {"certificate": authority.files.authority, broken: str(tmp_path / "bad.pem")}
        counts = send(endpoint, protocol, **files)
    assert (counts.exported, counts.dropped) == (0, 3)
    assert sum(counts.errors.values()) >= 1
    assert "check OTEL_EXPORTER_OTLP_CERTIFICATE, OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE" in caplog.text


@PROTOCOLS
def test_a_client_certificate_without_its_key_is_told(
    authority: Authority, protocol: OtlpProtocol, caplog: pytest.LogCaptureFixture
) -> None:
    with served(authority, protocol, mutual=True) as endpoint:
        files = {"certificate": authority.files.authority, "client_certificate": authority.files.client}
        assert send(endpoint, protocol, **files).dropped == 3
    assert "OTEL_EXPORTER_OTLP_CLIENT_KEY" in caplog.text
