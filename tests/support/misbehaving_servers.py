"""Endpoints that are none: they hang up, say nothing, say it slowly, or say nonsense."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

Behave = Callable[[socket.socket, threading.Event], None]
DRIPS, DRIP_S = 200, 0.05
RESET = struct.pack("ii", 1, 0)


@contextmanager
def misbehaving(behave: Behave) -> Iterator[int]:
    """Give the port of a server that lets `behave` have each connection, and an event that says when all is over."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def one(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                behave(connection, over)

        def serve() -> None:
            with suppress(OSError):
                while not over.is_set():
                    connection, _ = server.accept()
                    threading.Thread(target=one, args=(connection,), daemon=True).start()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        over.set()
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # wakes the thread where it waits
    thread.join()


def reset(connection: socket.socket, _: threading.Event) -> None:
    """Hang up at once, by a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


def silence(connection: socket.socket, over: threading.Event) -> None:
    """Take the connection and never say a word."""
    over.wait()


def nonsense(connection: socket.socket, _: threading.Event) -> None:
    """Answer in no protocol that there is."""
    connection.recv(65536)
    connection.sendall(b"\xff\x00What?\r\n\r\n" * 100)


def trickle(status: bytes) -> Behave:
    """Give a status, and then a byte of the answer's body now and then for ever."""

    def behave(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 %b\r\nContent-Length: 60000\r\n\r\n" % status)
        while not over.wait(0.05):
            connection.sendall(b".")

    return behave


def drip(connection: socket.socket, over: threading.Event) -> None:
    """Give an answer whose head comes byte by byte, no wait of them long, and is whole in the end."""
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nX-Drip: ")
    for _ in range(DRIPS):
        if over.wait(DRIP_S):
            return
        connection.sendall(b".")
    connection.sendall(b"\r\n\r\n")


def closed_port() -> int:
    """Give a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port
