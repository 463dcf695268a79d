"""Check TLS: the configured files, and the server's certificate."""

import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from torchotel.config.otlp_endpoint import Address, OtlpEndpoint
from torchotel.doctor.network import connect, detect_protocol, with_timeout
from torchotel.doctor.result import CheckFailed, Finding, failed, ok, warning

SUBJECT = "tls"
_SOON_DAYS = 14
_DAY_S = 86_400
# OpenSSL's numbers: https://docs.openssl.org/master/man3/X509_STORE_CTX_get_error/
_NOT_YET, _EXPIRED = 9, 10
_UNKNOWN_AUTHORITY = frozenset({2, 18, 19, 20, 21})
_OTHER_NAME = frozenset({62, 64})
WANTS_CERTIFICATE = (
    "The server may require a client certificate, or another one: set OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE and "
    "OTEL_EXPORTER_OTLP_CLIENT_KEY, and check the server's log."
)
"""Advice if a server with a valid certificate closes the connection; TLS 1.3 reports the reason late or never."""
_CA = "OTEL_EXPORTER_OTLP_CERTIFICATE"


class _EncryptedError(Exception):
    """A key is encrypted, and no password can be entered."""


def check_files(otlp_endpoint: OtlpEndpoint) -> Iterator[Finding]:
    """Read the configured certificates and the key."""
    for name, read in (("certificate", _load_authorities), ("client_certificate", _load_client)):
        path = getattr(otlp_endpoint, name)
        if path is None:
            continue
        try:
            read(ssl.create_default_context(), otlp_endpoint)
        except CheckFailed as failure:
            yield failed(SUBJECT, failure.text, failure.advice)
        else:
            yield ok(SUBJECT, f"{name} {path} can be read" + (", its key too" if name != "certificate" else ""))


def check_server(
    address: Address, otlp_endpoint: OtlpEndpoint, authorities: str, protocol: str, limit_s: float
) -> Iterator[Finding]:
    """Check the TLS handshake and the server's certificate.

    Args:
        address: Address of the server.
        otlp_endpoint: Endpoint with the client's certificate.
        authorities: PEM file or folder of trusted authorities.
        protocol: ALPN name of the protocol inside TLS; some servers require one.
        limit_s: Timeout of the connection and of each wait in the handshake.

    Raises:
        CheckFailed: The handshake failed.
    """
    context = _trusting(authorities)
    context.set_alpn_protocols([protocol])
    _load_client(context, otlp_endpoint)
    try:
        certificate, version = with_timeout(2 * limit_s, lambda: _handshake(context, address, limit_s))
    except ssl.SSLCertVerificationError as error:
        raise _certificate_error(address, authorities, error, limit_s) from None
    except (ssl.SSLError, OSError) as error:
        raise _handshake_error(address, error, limit_s) from None
    days = (ssl.cert_time_to_seconds(str(certificate["notAfter"])) - time.time()) / _DAY_S
    text = f"{version} with {address}, whose certificate is valid for {days:.0f} days"
    if days < _SOON_DAYS:
        yield warning(SUBJECT, text, "Renew the server's certificate. Exports fail once it has expired.")
    else:
        yield ok(SUBJECT, text)


def _trusting(authorities: str) -> ssl.SSLContext:
    if Path(authorities).is_dir():  # `requests` accepts a folder, too
        return ssl.create_default_context(capath=authorities)
    return ssl.create_default_context(cafile=authorities)


def _handshake(context: ssl.SSLContext, address: Address, limit_s: float) -> tuple[dict[str, Any], str | None]:
    with connect(address, limit_s) as plain, context.wrap_socket(plain, server_hostname=address.host) as secured:
        return dict(secured.getpeercert() or {}), secured.version()


def _load_authorities(context: ssl.SSLContext, otlp_endpoint: OtlpEndpoint) -> None:
    try:
        context.load_verify_locations(cafile=otlp_endpoint.certificate)
    except (ssl.SSLError, OSError) as error:
        advice = f"{_CA} names a PEM file (-----BEGIN CERTIFICATE-----) of the authorities."
        raise CheckFailed(f"certificate {otlp_endpoint.certificate} cannot be read: {_reason(error)}", advice) from None


def _load_client(context: ssl.SSLContext, otlp_endpoint: OtlpEndpoint) -> None:
    if otlp_endpoint.client_certificate is None:
        return
    description = f"client_certificate {otlp_endpoint.client_certificate}"
    key = "the same file" if otlp_endpoint.client_key is None else "the file of client_key"
    try:
        context.load_cert_chain(otlp_endpoint.client_certificate, otlp_endpoint.client_key, password=_refuse_password)
    except _EncryptedError:
        advice = "Use a key without a password: openssl pkey -in KEY -out PLAIN_KEY."
        raise CheckFailed(f"the key of {description}, in {key}, is encrypted", advice) from None
    except (ssl.SSLError, OSError) as error:
        if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
            raise CheckFailed(
                f"{description} and the key in {key} do not match", "Set client_key to the key of this certificate."
            ) from None
        advice = (
            "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE and OTEL_EXPORTER_OTLP_CLIENT_KEY name PEM files that this "
            "process may read."
        )
        raise CheckFailed(f"{description} with the key in {key} cannot be read: {_reason(error)}", advice) from None


def _refuse_password() -> NoReturn:
    raise _EncryptedError


def _certificate_error(
    address: Address, authorities: str, error: ssl.SSLCertVerificationError, limit_s: float
) -> CheckFailed:
    code = error.verify_code
    if code == _EXPIRED:
        return CheckFailed(f"the certificate of {address} has expired", "Renew the server's certificate.")
    if code == _NOT_YET:
        advice = "Check this machine's clock, and the server's certificate."
        return CheckFailed(f"the certificate of {address} is not valid yet", advice)
    if code in _OTHER_NAME:
        names = _names(address, authorities, limit_s)
        text = f"the certificate of {address} is for other names: {names or 'none'}"
        return CheckFailed(text, "Use one of these names in the endpoint, or issue a certificate for this name.")
    advice = f"Set {_CA} to the PEM file of the authority that signed the server's certificate."
    if code in _UNKNOWN_AUTHORITY:
        text = f"the certificate of {address} is not signed by an authority in {authorities} ({error.verify_message})"
        return CheckFailed(text, advice)
    return CheckFailed(f"the certificate of {address} is not trusted: {error.verify_message}", advice)


def _names(address: Address, authorities: str, limit_s: float) -> str:
    """Return the names for which the server's certificate is valid."""
    context = _trusting(authorities)
    context.check_hostname = False
    try:
        certificate, _ = with_timeout(2 * limit_s, lambda: _handshake(context, address, limit_s))
    except OSError:
        return ""
    return ", ".join(str(entry[1]) for entry in certificate.get("subjectAltName", ()))


def _handshake_error(address: Address, error: OSError, limit_s: float) -> CheckFailed:
    if detect_protocol(address._replace(tls=False), limit_s) in {"gRPC", "HTTP"}:
        return CheckFailed(f"{address} does not use TLS", "Use http:// instead of https:// in the endpoint.")
    if isinstance(error, TimeoutError):
        text = f"{address} accepted the connection but did not answer the TLS handshake within {limit_s:g} s"
        return CheckFailed(text, "Check that the port uses TLS.")
    return CheckFailed(f"the TLS handshake with {address} failed: {_reason(error)}", WANTS_CERTIFICATE)


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "not in PEM form").replace("_", " ").lower()
    return error.strerror or str(error)
