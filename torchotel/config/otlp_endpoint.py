"""Where one signal goes over OTLP, and how."""

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
"""Characters that are repeated of what another program says."""
_MIN_SECRET = 4
"""Characters of what is looked for in such words: a flag or a tenant's number is none."""


_PORTS = {"http": 80, "https": 443}


class Address(NamedTuple):
    """Host and port that an endpoint stands for."""

    host: str
    port: int
    tls: bool

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class OtlpEndpoint(NamedTuple):
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

    def __repr__(self) -> str:
        return f"Receiver({self.shown!r}, {self.protocol!r})"

    @property
    def shown(self) -> str:
        """Where it is, without credentials."""
        return without_credentials(self.endpoint)

    @property
    def address(self) -> Address | None:
        """Whom it calls; None where gRPC's own resolvers are asked for more than host and port."""
        return address_of(self.endpoint, insecure=self.insecure)

    def quote(self, text: object) -> str:
        """Give what a server or a library says of it in one printable line of bounded length, without our secrets."""
        said = str(text)
        for secret in sorted(set(self._secrets()), key=len, reverse=True):
            said = said.replace(secret, "...") if len(secret) >= _MIN_SECRET else said
        line = printable(" ".join(said.split()))
        return line if len(line) <= MAX_QUOTED else line[: MAX_QUOTED - 3] + "..."

    def _secrets(self) -> Iterator[str]:
        for value in self.headers.values():
            yield value
            yield value.rpartition(" ")[2]  # "Bearer …" is often told without its first word
        user, _, place = self.endpoint.rpartition("://")[2].rpartition("@")
        for text in (user, user.partition(":")[2], place.partition("?")[2], place.partition("=")[2]):
            yield text
            yield unquote(text)


def is_loopback(host: str) -> bool:
    """Tell whether an address can be reached from this machine only."""
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
    """Read a URL, whose scheme says whether there is TLS, or `host:port`; None for gRPC's other targets."""
    parts = urlsplit(endpoint)
    url = parts.scheme in _PORTS
    if not url:
        parts = urlsplit(f"//{endpoint}")
    with suppress(ValueError):  # as of `ipv4:1.2.3.4:1`, which has two colons
        port = parts.port or _PORTS.get(parts.scheme)
        if parts.hostname and port and (url or not parts.path):
            return Address(parts.hostname, port, parts.scheme == "https" if url else not insecure)
    return None


def default_endpoint(protocol: object) -> str:
    """Give where receivers listen when nobody says it: each protocol has a port of its own."""
    return f"http://localhost:{4317 if protocol == 'grpc' else 4318}"


def signal_endpoint(base: str, signal: str, protocol: object) -> str:
    """Give a signal's endpoint below a base URL."""
    return base if protocol == "grpc" else f"{base.rstrip('/')}/v1/{signal}"


def without_credentials(url: str) -> str:
    """Cut user, password, query and fragment off a URL, or off what was meant for one."""
    # All before the last @: a password may hold whatever ends a host.
    return re.sub(r"^([A-Za-z][A-Za-z0-9+.-]*://)?.*@", r"\1", url, flags=re.DOTALL).partition("?")[0].partition("#")[0]
