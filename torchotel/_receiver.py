"""Where one signal goes over OTLP, and how."""

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias
from urllib.parse import urlsplit, urlunsplit

OtlpProtocol: TypeAlias = Literal["http/protobuf", "grpc"]
OtlpCompression: TypeAlias = Literal["gzip", "none"]


class Receiver(NamedTuple):
    """An OTLP receiver of one signal."""

    endpoint: str
    """Over HTTP the full URL with the signal's path; over gRPC a URL, of which host and port count, or a target."""
    protocol: OtlpProtocol = "http/protobuf"
    headers: Mapping[str, str] = {}
    """Of each request."""
    compression: OtlpCompression = "gzip"
    timeout_s: float = 10.0
    """Longest wait for the answer to one attempt."""
    certificate: str | None = None
    """PEM file of the authorities that may sign the server's certificate; None: the usual ones."""
    client_certificate: str | None = None
    """PEM file that says who this client is."""
    client_key: str | None = None
    """PEM file of its private key; None: it is in the certificate's file."""
    insecure: bool = False
    """Without TLS, where a gRPC target has no scheme that says it."""


def default_endpoint(protocol: object) -> str:
    """Give where receivers listen when nobody says it: each protocol has a port of its own."""
    return f"http://localhost:{4317 if protocol == 'grpc' else 4318}"


def signal_endpoint(base: str, signal: str, protocol: object) -> str:
    """Give a signal's endpoint below a base URL."""
    return base if protocol == "grpc" else f"{base.rstrip('/')}/v1/{signal}"


def without_user(url: str) -> str:
    """Cut user and password off a URL."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
