"""Where one signal goes over OTLP, and how."""

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

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
