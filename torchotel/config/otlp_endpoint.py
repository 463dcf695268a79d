"""The OTLP endpoint of one signal: address, protocol, headers and certificates."""

import ipaddress
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Literal, NamedTuple, TypeAlias
from urllib.parse import unquote, urlsplit

from torchotel._utils.text import printable

OtlpProtocol: TypeAlias = Literal["http/protobuf", "grpc"]
OtlpCompression: TypeAlias = Literal["gzip", "none"]

MAX_QUOTED = 300
"""Most characters that a message quotes of another program."""
_MIN_SECRET = 4
"""Least characters of a secret that `quote` removes; a shorter header value is a flag or a number."""

_PORTS = {"http": 80, "https": 443}


class Address(NamedTuple):
    """Host and port of an endpoint."""

    host: str
    port: int
    tls: bool

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class OtlpEndpoint(NamedTuple):
    """The settings of the connection to an OTLP receiver, for one signal."""

    endpoint: str
    """Over HTTP the full URL with the signal's path; over gRPC a target, or a URL whose host and port are used."""
    protocol: OtlpProtocol = "http/protobuf"
    headers: Mapping[str, str] = {}
    """Headers of each request."""
    compression: OtlpCompression = "gzip"
    timeout_s: float = 10.0
    """Seconds until one attempt times out."""
    certificate: str | None = None
    """PEM file of the certificate authorities; None: those of `certifi`, or of gRPC."""
    client_certificate: str | None = None
    """PEM file of the client's certificate."""
    client_key: str | None = None
    """PEM file of the client's private key; None: the certificate's file has it, too."""
    insecure: bool = False
    """Whether a gRPC target without a scheme is called without TLS."""

    def __repr__(self) -> str:
        return f"OtlpEndpoint({self.shown!r}, {self.protocol!r})"

    @property
    def shown(self) -> str:
        """The endpoint without credentials, for messages."""
        return without_credentials(self.endpoint)

    @property
    def address(self) -> Address | None:
        """Host and port; None for a gRPC target that gRPC resolves itself."""
        return address_of(self.endpoint, insecure=self.insecure)

    def quote(self, text: object) -> str:
        """Return the text of a server or a library as one printable line of bounded length, without credentials."""
        quoted = str(text)
        for secret in sorted(set(self._secrets()), key=len, reverse=True):
            quoted = quoted.replace(secret, "...") if len(secret) >= _MIN_SECRET else quoted
        line = printable(" ".join(quoted.split()))
        return line if len(line) <= MAX_QUOTED else line[: MAX_QUOTED - 3] + "..."

    def _secrets(self) -> Iterator[str]:
        for value in self.headers.values():
            yield value
            yield value.rpartition(" ")[2]  # the token after "Bearer "
        user, _, place = self.endpoint.rpartition("://")[2].rpartition("@")
        for text in (user, user.partition(":")[2], place.partition("?")[2], place.partition("=")[2]):
            yield text
            yield unquote(text)


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def host_without_proxy(endpoint: str) -> str | None:
    """Return the host of an endpoint on this machine, which no proxy may see; None for any other endpoint.

    A proxy would resolve `localhost` to itself, and would get the headers with their credentials.
    """
    address = address_of(endpoint, insecure=True)
    return address.host if address is not None and is_loopback(address.host) else None


def address_of(endpoint: str, *, insecure: bool) -> Address | None:
    """Parse a URL, whose scheme decides about TLS, or `host:port`; return None for gRPC's other targets."""
    parts = urlsplit(endpoint)
    url = parts.scheme in _PORTS
    if not url:
        parts = urlsplit(f"//{endpoint}")
    with suppress(ValueError):  # `ipv4:1.2.3.4:1` has two colons
        port = parts.port or _PORTS.get(parts.scheme)
        if parts.hostname and port and (url or not parts.path):
            return Address(parts.hostname, port, parts.scheme == "https" if url else not insecure)
    return None


def default_endpoint(protocol: object) -> str:
    """Return the default endpoint of a protocol."""
    return f"http://localhost:{4317 if protocol == 'grpc' else 4318}"


def signal_endpoint(base: str, signal: str, protocol: object) -> str:
    """Return the endpoint of a signal below a base URL."""
    return base if protocol == "grpc" else f"{base.rstrip('/')}/v1/{signal}"


def without_credentials(url: str) -> str:
    """Return a URL, which may be malformed, without user, password, query and fragment."""
    # All before the last @ goes, since a password may contain "/" and "@".
    return re.sub(r"^([A-Za-z][A-Za-z0-9+.-]*://)?.*@", r"\1", url, flags=re.DOTALL).partition("?")[0].partition("#")[0]
