"""Test the doctor's TLS checks on real servers: each cause of a failure has its own finding."""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from support.doctor_results import only
from support.otlp_http_receiver import receiver

from torchotel.config.config import Config
from torchotel.doctor import endpoint
from torchotel.doctor.result import Finding, Level

NOW = datetime.now(UTC)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def trusted(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write the authority's certificate to a file."""
    path = str(tmp_path_factory.mktemp("tls") / "authority.pem")
    authority.cert_pem.write_to_path(path)
    return path


@contextmanager
def serving(certificate: trustme.LeafCert, clients: trustme.CA | None = None) -> Iterator[str]:
    """Run a receiver with TLS; yield its base URL."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    certificate.configure_cert(context)
    if clients is not None:
        clients.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
    with receiver() as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  # failing handshakes are expected
        yield f"https://127.0.0.1:{server.server_port}"


def run_checks(base: str, **settings: Any) -> list[Finding]:
    return list(endpoint.check(Config(endpoint=base, timeout_s=5.0, **settings)))


def test_shakes_hands_and_sends(authority: trustme.CA, trusted: str) -> None:
    with serving(authority.issue_cert("127.0.0.1", not_after=NOW + timedelta(days=100))) as base:
        findings = run_checks(base, certificate=trusted)
    assert [finding.subject for finding in findings] == ["tls", "tls", "endpoint", "test span", "clock"]
    assert findings[0].text == f"certificate {trusted} can be read"
    assert "TLSv1.3 with 127.0.0.1:" in findings[1].text
    assert "is valid for 100 days" in findings[1].text


def test_tells_that_a_certificate_ends_soon(authority: trustme.CA, trusted: str) -> None:
    with serving(authority.issue_cert("127.0.0.1", not_after=NOW + timedelta(days=3))) as base:
        found = run_checks(base, certificate=trusted)[1]
    assert found.level is Level.WARNING
    assert "is valid for 3 days" in found.text
    assert "Renew" in found.advice


@pytest.mark.parametrize(
    ("name", "days", "known", "text", "advice"),
    [
        ("127.0.0.1", 9, False, "is not signed by an authority in", "OTEL_EXPORTER_OTLP_CERTIFICATE"),
        ("127.0.0.1", -1, True, "has expired", "Renew the server's certificate"),
        ("collector.example", 9, True, "is for other names: collector.example", "one of these names"),
    ],
)
def test_tells_what_is_wrong_with_a_certificate(
    authority: trustme.CA, trusted: str, name: str, days: int, *, known: bool, text: str, advice: str
) -> None:
    leaf = authority.issue_cert(name, not_before=NOW - timedelta(days=9), not_after=NOW + timedelta(days=days))
    with serving(leaf) as base:
        found = only("endpoint", run_checks(base, certificate=trusted if known else None))
    assert found.level is Level.FAILED
    assert text in found.text
    assert advice in found.advice


def test_knows_a_port_without_tls() -> None:
    with receiver() as server:
        found = only("endpoint", run_checks(server.url.replace("http", "https").removesuffix("/v1/traces")))
    assert found.text.endswith("does not use TLS")
    assert "http:// instead of https://" in found.advice


def test_tells_that_a_client_certificate_is_wanted(authority: trustme.CA, trusted: str) -> None:
    with serving(authority.issue_cert("127.0.0.1"), clients=authority) as base:
        found = only("endpoint", run_checks(base, certificate=trusted))
    assert found.level is Level.FAILED
    assert "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE" in found.advice


def test_shows_the_client_certificate(authority: trustme.CA, trusted: str, tmp_path: Path) -> None:
    both = str(tmp_path / "client.pem")
    authority.issue_cert("client").private_key_and_cert_chain_pem.write_to_path(both)
    with serving(authority.issue_cert("127.0.0.1"), clients=authority) as base:
        findings = run_checks(base, certificate=trusted, client_certificate=both)
    assert only("endpoint", findings).level is not Level.FAILED


def test_tells_files_that_cannot_be_used(authority: trustme.CA, tmp_path: Path) -> None:
    """Unusable files are reported, without asking for the password of a key."""
    ours, other = authority.issue_cert("client"), authority.issue_cert("other")
    certificate, key, locked, text = (str(tmp_path / name) for name in ("c.pem", "k.pem", "locked.pem", "text.pem"))
    ours.cert_chain_pems[0].write_to_path(certificate)
    other.private_key_pem.write_to_path(key)
    plain = load_pem_private_key(ours.private_key_pem.bytes(), None)
    encrypted = plain.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"sesame"))
    Path(locked).write_bytes(encrypted)
    Path(text).write_text("not a certificate")
    for settings, what in (
        ({"client_certificate": certificate, "client_key": key}, "do not match"),
        ({"client_certificate": certificate, "client_key": locked}, "is encrypted"),
        ({"client_certificate": text}, "cannot be read"),
        ({"certificate": text}, "cannot be read"),
    ):
        findings = run_checks("https://127.0.0.1:1", **settings)
        assert [finding.level for finding in findings] == [Level.FAILED] * 2
        assert what in findings[0].text
        assert findings[1].text == "skipped: fix the certificate files above first"
