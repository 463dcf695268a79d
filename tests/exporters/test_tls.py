"""TLS over both protocols: who is at the other end is verified, and the client shows a certificate where it has one."""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
import trustme
from grpc_receiver import grpc_receiver
from receiver import receiver
from senders import soon

from torchotel._receiver import OtlpProtocol, Receiver
from torchotel.exporters.otlp.connect import make_transport
from torchotel.exporters.otlp.sender import Sender
from torchotel.exporters.otlp.signals import TRACES
from torchotel.exporters.stats import ExportCounts, ExportStats


class Files(NamedTuple):
    """Certificates of one test, each a PEM file."""

    authority: str
    stranger: str
    """Another authority, which signed nothing here."""
    client: str
    client_key: str
    client_both: str
    """The client's certificate and key in one file."""


class Authority:
    """One that signed the server's certificate and the client's."""

    def __init__(self, folder: Path) -> None:
        self.ca = trustme.CA()
        self.server, self.client = self.ca.issue_cert("localhost", "127.0.0.1"), self.ca.issue_cert("client")
        self.files = Files(*(str(folder / name) for name in Files._fields))
        self.ca.cert_pem.write_to_path(self.files.authority)
        trustme.CA().cert_pem.write_to_path(self.files.stranger)
        self.client.cert_chain_pems[0].write_to_path(self.files.client)
        self.client.private_key_pem.write_to_path(self.files.client_key)
        self.client.private_key_and_cert_chain_pem.write_to_path(self.files.client_both)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@contextmanager
def served(authority: Authority, protocol: OtlpProtocol, *, mutual: bool) -> Iterator[str]:
    """Run a receiver with TLS, and give its endpoint."""
    if protocol == "grpc":
        key, chain = authority.server.private_key_pem.bytes(), authority.server.cert_chain_pems[0].bytes()
        trusted = authority.ca.cert_pem.bytes() if mutual else None
        credentials = grpc.ssl_server_credentials([(key, chain)], trusted, mutual)
        with grpc_receiver("localhost:0", credentials) as server:
            yield server.endpoint
        return
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.server.configure_cert(context)
    if mutual:
        authority.ca.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
    with receiver() as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        yield server.url.replace("http://127.0.0.1", "https://localhost")


def send(endpoint: str, protocol: OtlpProtocol, **certificates: Any) -> ExportCounts:
    """Send one request and say what became of it."""
    stats = ExportStats()
    transport = make_transport(Receiver(endpoint, protocol, timeout_s=5, **certificates), TRACES, version="1.2")
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
def test_a_server_that_asks_in_vain_takes_nothing(authority: Authority, protocol: OtlpProtocol) -> None:
    """Without a client certificate there is no connection, and the spans are counted as dropped."""
    with served(authority, protocol, mutual=True) as endpoint:
        counts = send(endpoint, protocol, certificate=authority.files.authority)
    assert (counts.exported, counts.dropped) == (0, 3)


@pytest.mark.parametrize("broken", ["certificate", "client_certificate"])
@PROTOCOLS
def test_a_file_that_is_no_certificate_harms_nobody(
    authority: Authority, protocol: OtlpProtocol, broken: str, tmp_path: Path
) -> None:
    """What the file holds is found out on the worker, told and counted."""
    (tmp_path / "bad.pem").write_text("no certificate\n")
    with served(authority, protocol, mutual=False) as endpoint:
        files = {"certificate": authority.files.authority, broken: str(tmp_path / "bad.pem")}
        counts = send(endpoint, protocol, **files)
    assert (counts.exported, counts.dropped) == (0, 3)
    assert sum(counts.errors.values()) >= 1
