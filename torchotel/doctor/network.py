"""Ways to an endpoint, step by step, none of which takes longer than it may."""

import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from torchotel._receiver import Address

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
