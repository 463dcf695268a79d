"""What tests of the doctor share: findings as (level, text, advice), and servers that are no receivers."""

import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torchotel._config import Config
from torchotel.doctor import endpoint
from torchotel.doctor.finding import Finding


def examined(url: str, subject: str = "endpoint", *, own_path: bool = False, **settings: Any) -> Finding:
    """Examine an endpoint and give the only finding about a subject."""
    where = {"traces_endpoint": url} if own_path else {"endpoint": url}
    config = Config.read({"timeout_s": 2.0, **where, **settings}, {})
    return only(subject, endpoint.check(config))


def only(subject: str, findings: Iterable[Finding]) -> Finding:
    """Give the only finding about a subject."""
    (found,) = (finding for finding in findings if finding.subject == subject)
    return found


@contextmanager
def saying(answer: bytes) -> Iterator[str]:
    """Run a server that says the same to everybody, or nothing, and give its base URL."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                held.append(connection)
                if answer:
                    connection.sendall(answer)
                    connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in held:
                connection.close()
