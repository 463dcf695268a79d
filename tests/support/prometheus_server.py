"""A real Prometheus on loopback: the pinned one if it has been built, else what the system has."""

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

from torchotel.stack import paths

PATIENCE_S = 150
"""Recordings look back in steps of half a minute, of which they want two."""
Found = TypeVar("Found")


def binary(name: str = "prometheus") -> str | None:
    """Give the path of `prometheus` or `promtool`, where there is one."""
    pinned = paths.PROMETHEUS
    return str(pinned.binary(name)) if pinned.is_complete else shutil.which(name)


class Prometheus:
    """A server's HTTP API."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/api/v1/"

    def get(self, path: str, **query: str) -> Any:
        with urlopen(f"{self.url}{path}?{urlencode(query)}", timeout=10) as answer:  # noqa: S310  # http, to a server of the tests
            return json.load(answer)["data"]

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Give the series that an expression has now."""
        found: list[dict[str, Any]] = self.get("query", query=expr)["result"]
        return found

    def names(self, job: str) -> set[str]:
        """Give the names of a job's series."""
        return {one["metric"]["__name__"] for one in self.query(f'{{job="{job}"}}')}


def until(ask: Callable[[], Found], good: Callable[[Found], bool]) -> Found:
    """Ask until the answer is good."""
    deadline_s = time.monotonic() + PATIENCE_S
    answer: object = None
    while time.monotonic() < deadline_s:
        try:
            answer = found = ask()
            if good(found):
                return found
        except URLError as error:  # it is starting
            answer = error
        time.sleep(0.2)  # it tells nobody when it has scraped
    raise AssertionError(f"the last answer was {answer}")


@contextmanager
def prometheus_server(config: str, folder: Path, *words: str) -> Iterator[Prometheus]:
    """Run a server with a configuration, its data in a folder.

    Args:
        config: Text of its `prometheus.yml`.
        folder: Where it and the data are.
        words: Further arguments.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    file = folder / "prometheus.yml"
    file.write_text(config)
    command = [
        str(binary()),
        f"--config.file={file}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
        *words,
    ]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        yield Prometheus(port)
    finally:
        server.terminate()
        server.wait()
