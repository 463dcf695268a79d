"""Helpers for tests of the doctor: findings as (level, text, advice), and servers that are not receivers."""

import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torchotel.config.config import Config
from torchotel.doctor import endpoint
from torchotel.doctor.result import Finding


def examined(url: str, subject: str = "endpoint", *, own_path: bool = False, **settings: Any) -> Finding:
    """Check an endpoint and return the only finding on a subject."""
    where = {"traces_endpoint": url} if own_path else {"endpoint": url}
    config = Config.read({"timeout_s": 2.0, **where, **settings}, {})
    return only(subject, endpoint.check(config))


def only(subject: str, findings: Iterable[Finding]) -> Finding:
    """Return the only finding on a subject."""
    (found,) = (finding for finding in findings if finding.subject == subject)
    return found


@contextmanager
def saying(answer: bytes, then_s: float | None = None) -> Iterator[str]:
    """Run a server that sends the same bytes to every client; yield its base URL.

    Args:
        answer: Bytes to send; empty: the connection stays open in silence.
        then_s: Interval in seconds of further single bytes; None: the connection is closed.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        ended = threading.Event()
        threads: list[threading.Thread] = []

        def answer_one(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                connection.sendall(answer)
                while then_s is not None and not ended.wait(then_s):
                    connection.sendall(b"x")
                if not answer:
                    ended.wait()

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    threads.append(threading.Thread(target=answer_one, args=(connection,)))
                    threads[-1].start()

        threads.append(threading.Thread(target=serve))
        threads[0].start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            ended.set()
            server.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()
