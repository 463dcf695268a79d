"""Check name resolution, connection and protocol of an endpoint."""

import errno
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from torchotel.config.otlp_endpoint import Address, OtlpEndpoint
from torchotel.doctor.result import CheckFailed
from torchotel.exporters.otlp.transport import Signal

T = TypeVar("T")

# RFC 9113: the client's HTTP/2 preface, and the type of the server's first frame.
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_SETTINGS_FRAME = 4
_FRAME_HEAD_BYTES = 9
_FRAME_TYPE_AT = 3
_HTTP = b"HTTP/"


def with_timeout(limit_s: float, call: Callable[[], T]) -> T:
    """Call a function; raise TimeoutError if it does not return in time. The call then continues in a daemon thread.

    `getaddrinfo` has no timeout, and the timeout of `create_connection` applies to each address of a host.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
            errors.append(error)

    thread = threading.Thread(target=run, name="torchotel-doctor", daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer in {limit_s:g} s")
    return results[0]


def resolve(address: Address, limit_s: float) -> list[str]:
    """Return the addresses of a host; raise OSError if there is none, TimeoutError if the resolver does not answer."""
    addresses = with_timeout(limit_s, lambda: socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM))
    return list(dict.fromkeys(str(entry[4][0]) for entry in addresses))


def connect(address: Address, limit_s: float) -> socket.socket:
    """Connect to the first address of the host that accepts a connection; raise OSError if none does."""
    return with_timeout(limit_s + 1, lambda: socket.create_connection(address[:2], timeout=limit_s))


def speaks_http2(address: Address, limit_s: float) -> bool:
    """Return whether a server speaks HTTP/2 without negotiation, as gRPC servers do."""
    head = _exchange(address, _HTTP2_PREFACE, "h2", _FRAME_HEAD_BYTES, limit_s)
    return len(head) == _FRAME_HEAD_BYTES and head[_FRAME_TYPE_AT] == _SETTINGS_FRAME


def speaks_http(address: Address, limit_s: float) -> bool:
    """Return whether a server answers HTTP/1."""
    return _exchange(address, b"OPTIONS * HTTP/1.0\r\n\r\n", "http/1.1", len(_HTTP), limit_s) == _HTTP


def speaks_tls(address: Address, limit_s: float) -> bool:
    """Return whether a server completes a TLS handshake; its certificate is not verified."""
    with suppress(OSError), connect(address, limit_s) as plain, _wrap_tls(plain, address, "http/1.1"):
        return True
    return False


def _exchange(address: Address, request_bytes: bytes, alpn: str, size_bytes: int, limit_s: float) -> bytes:
    """Send bytes to a server and return the first bytes of its answer; empty if it accepts no connection."""
    with (
        suppress(OSError),
        connect(address, limit_s) as plain,
        _wrap_tls(plain, address, alpn) if address.tls else plain as connection,
    ):
        connection.sendall(request_bytes)
        return _read(connection, size_bytes, limit_s)
    return b""


def _wrap_tls(plain: socket.socket, address: Address, alpn: str) -> ssl.SSLSocket:
    """Start TLS without verifying the certificate; no credentials are sent over this connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols([alpn])
    return context.wrap_socket(plain, server_hostname=address.host)


def _read(connection: socket.socket, size_bytes: int, limit_s: float) -> bytes:
    """Read up to `size_bytes`, or what arrives in time."""
    deadline_s = time.monotonic() + limit_s
    read = b""
    while len(read) < size_bytes and (left_s := deadline_s - time.monotonic()) > 0:
        connection.settimeout(left_s)
        try:
            received = connection.recv(size_bytes - len(read))
        except TimeoutError:
            break
        if not received:
            break
        read += received
    return read


_START = "Start a Collector or Jaeger there, or set another endpoint: --endpoint or OTEL_EXPORTER_OTLP_ENDPOINT."
_BLOCKED = "A firewall drops the packets, or the address is wrong: check that this machine can reach it."


def check_connectivity(address: Address, limit_s: float) -> None:
    """Resolve the host name and open a connection.

    Raises:
        CheckFailed: The name has no address, or no address accepts a connection.
    """
    try:
        addresses = resolve(address, limit_s)
    except TimeoutError:
        raise CheckFailed(
            f"the resolver did not answer for {address.host} within {limit_s:g} s", "Check DNS on this machine."
        ) from None
    except (OSError, UnicodeError) as error:  # UnicodeError: the name cannot be encoded
        advice = "Check the spelling and DNS. The name of a service in a cluster resolves only inside the cluster."
        raise CheckFailed(f"the host name {address.host} cannot be resolved ({_error_text(error)})", advice) from None
    try:
        connect(address, limit_s).close()
    except TimeoutError:
        raise CheckFailed(f"{address} did not answer within {limit_s:g} s", _BLOCKED) from None
    except ConnectionRefusedError:
        at = "" if addresses == [address.host] else f" ({', '.join(addresses)})"
        raise CheckFailed(f"nothing listens at {address}{at}: the connection was refused", _START) from None
    except OSError as error:
        reason = errno.errorcode.get(error.errno or 0, type(error).__name__)
        raise CheckFailed(f"{address} cannot be reached: {_error_text(error)} ({reason})", _BLOCKED) from None


def detect_protocol(address: Address, limit_s: float) -> str:
    """Return the protocol of a server that did not answer as expected: "gRPC", "HTTP" or "TLS"; "" if unknown."""
    if speaks_http2(address, limit_s):
        return "gRPC"
    # Before HTTP: a TLS server may answer plain HTTP with an error in plain HTTP.
    if not address.tls and speaks_tls(address, limit_s):
        return "TLS"
    return "HTTP" if speaks_http(address, limit_s) else ""


def _error_text(error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return error.args[1] if len(error.args) > 1 else str(error)
    return getattr(error, "strerror", None) or str(error)


_MAX_STEP_S = 5.0
"""Longest wait in each step before the request."""
_MAX_TIMEOUT_S = 10.0
"""Longest wait for the response, even if the configured timeout is longer."""


class Request(NamedTuple):
    """One OTLP request and the endpoint that it is sent to."""

    subject: str
    """Subject of the findings."""
    otlp_endpoint: OtlpEndpoint
    signal: Signal
    body: bytes
    response: Any
    """Type of the response message."""
    version: str
    """Version of torchotel."""

    @property
    def step_s(self) -> float:
        """Timeout in seconds of each step before the request."""
        return min(self.otlp_endpoint.timeout_s, _MAX_STEP_S)

    @property
    def limit_s(self) -> float:
        """Timeout in seconds of the response."""
        return min(self.otlp_endpoint.timeout_s, _MAX_TIMEOUT_S)
