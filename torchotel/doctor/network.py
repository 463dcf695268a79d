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

# RFC 9113: what a client of HTTP/2 says first, and the kind of frame that a server says first.
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_SETTINGS_FRAME = 4
_FRAME_HEAD_BYTES = 9
_FRAME_TYPE_AT = 3
_HTTP = b"HTTP/"


def within(limit_s: float, call: Callable[[], T]) -> T:
    """Call, and raise TimeoutError where it has not come back in time; it then goes on in a thread that nobody awaits.

    The resolver takes no time limit at all, and each address of a host is tried for as long as one may take.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001 - it is raised where it belongs
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
    """Ask the resolver for the host's addresses; raise OSError where it has none, TimeoutError where it is silent."""
    found = within(limit_s, lambda: socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM))
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def connect(address: Address, limit_s: float) -> socket.socket:
    """Open a connection to the first of the host's addresses that takes one; raise OSError where none does."""
    return within(limit_s + 1, lambda: socket.create_connection(address[:2], timeout=limit_s))


def speaks_http2(address: Address, limit_s: float) -> bool:
    """Tell whether a server takes HTTP/2 without being asked, as those of gRPC do and web servers do not."""
    head = _answer(address, _HTTP2_PREFACE, "h2", _FRAME_HEAD_BYTES, limit_s)
    return len(head) == _FRAME_HEAD_BYTES and head[_FRAME_TYPE_AT] == _SETTINGS_FRAME


def speaks_http(address: Address, limit_s: float) -> bool:
    """Tell whether a server answers HTTP/1."""
    return _answer(address, b"OPTIONS * HTTP/1.0\r\n\r\n", "http/1.1", len(_HTTP), limit_s) == _HTTP


def speaks_tls(address: Address, limit_s: float) -> bool:
    """Tell whether a server takes a TLS handshake, whatever its certificate says."""
    with suppress(OSError), connect(address, limit_s) as plain, _secured(plain, address, "http/1.1"):
        return True
    return False


def _answer(address: Address, question: bytes, alpn: str, size_bytes: int, limit_s: float) -> bytes:
    """Say something to a server and give the first bytes that it answers; none where it takes no connection."""
    with (
        suppress(OSError),
        connect(address, limit_s) as plain,
        _secured(plain, address, alpn) if address.tls else plain as connection,
    ):
        connection.sendall(question)
        return _read(connection, size_bytes, limit_s)
    return b""


def _secured(plain: socket.socket, address: Address, alpn: str) -> ssl.SSLSocket:
    """Talk TLS with whoever is there; nothing that matters is said to them."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols([alpn])
    return context.wrap_socket(plain, server_hostname=address.host)


def _read(connection: socket.socket, size_bytes: int, limit_s: float) -> bytes:
    """Read so many bytes, or what came of them in time."""
    deadline_s = time.monotonic() + limit_s
    read = b""
    while len(read) < size_bytes and (left_s := deadline_s - time.monotonic()) > 0:
        connection.settimeout(left_s)
        try:
            piece = connection.recv(size_bytes - len(read))
        except TimeoutError:
            break
        if not piece:
            break
        read += piece
    return read


_START = "Start a Collector or Jaeger there, or set another endpoint: --endpoint or OTEL_EXPORTER_OTLP_ENDPOINT."
_BLOCKED = "A firewall drops the packets, or the address is wrong: check that this machine can reach it."


def reach(address: Address, limit_s: float) -> None:
    """Resolve the name and open a connection.

    Raises:
        Trouble: There is no such name, or nobody who takes a connection.
    """
    try:
        found = resolve(address, limit_s)
    except TimeoutError:
        raise CheckFailed(
            f"the resolver did not answer for {address.host} within {limit_s:g} s", "Check DNS on this machine."
        ) from None
    except (OSError, UnicodeError) as error:  # a name that is none can't even be encoded
        advice = "Check the spelling and DNS. The name of a service in a cluster resolves only inside the cluster."
        raise CheckFailed(f"the host name {address.host} cannot be resolved ({_words(error)})", advice) from None
    try:
        connect(address, limit_s).close()
    except TimeoutError:
        raise CheckFailed(f"{address} did not answer within {limit_s:g} s", _BLOCKED) from None
    except ConnectionRefusedError:
        at = "" if found == [address.host] else f" ({', '.join(found)})"
        raise CheckFailed(f"nothing listens at {address}{at}: the connection was refused", _START) from None
    except OSError as error:
        reason = errno.errorcode.get(error.errno or 0, type(error).__name__)
        raise CheckFailed(f"{address} cannot be reached: {_words(error)} ({reason})", _BLOCKED) from None


def who_is_there(address: Address, limit_s: float) -> str:
    """Say what a server speaks that did not answer as it should: "gRPC", "HTTP", "TLS", or "" for none of them."""
    if speaks_http2(address, limit_s):
        return "gRPC"
    # Before HTTP: a server with TLS may answer plain HTTP with a complaint in plain HTTP.
    if not address.tls and speaks_tls(address, limit_s):
        return "TLS"
    return "HTTP" if speaks_http(address, limit_s) else ""


def _words(error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return error.args[1] if len(error.args) > 1 else str(error)
    return getattr(error, "strerror", None) or str(error)


_MAX_STEP_S = 5.0
"""Longest wait in each step on the way to an endpoint."""
_MAX_TIMEOUT_S = 10.0
"""Longest wait for its answer, where the configured timeout is longer."""


class Request(NamedTuple):
    """One request, and who takes it."""

    subject: str
    """Of the findings."""
    receiver: OtlpEndpoint
    signal: Signal
    body: bytes
    response: Any
    """OTLP's message type of the answer."""
    version: str
    """Of torchotel."""

    @property
    def step_s(self) -> float:
        """Longest wait in each step on the way there."""
        return min(self.receiver.timeout_s, _MAX_STEP_S)

    @property
    def limit_s(self) -> float:
        """Longest wait for its answer."""
        return min(self.receiver.timeout_s, _MAX_TIMEOUT_S)
