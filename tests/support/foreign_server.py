"""A server of another program, which answers every request."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from threading import Thread

from support.fake_container_engine import Fine


@contextmanager
def stranger(port: str) -> Iterator[None]:
    """Run the server on a port during the block."""
    with ThreadingHTTPServer(("127.0.0.1", int(port)), Fine) as server:
        serving = Thread(target=server.serve_forever)
        serving.start()
        yield
        server.shutdown()
        serving.join()
