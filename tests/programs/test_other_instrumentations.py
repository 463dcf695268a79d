"""OpenTelemetry's own instrumentations inside a dataset and inside a forward: their spans and logs join the step."""

import logging
import sqlite3
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests
import torch
from opentelemetry.instrumentation.logging import LoggingInstrumentor
from opentelemetry.instrumentation.requests import RequestsInstrumentor
from opentelemetry.instrumentation.sqlite3 import SQLite3Instrumentor
from support.both_exports import ENGINES, Look, looked
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class _Answers(BaseHTTPRequestHandler):
    """Keeps the traceparent of each request."""

    parents: list[str]

    def do_GET(self) -> None:
        self.parents.append(self.headers.get("traceparent", ""))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def site() -> Iterator[tuple[str, list[str]]]:
    """Run a web server; give its address and the traceparents that came."""
    parents: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Answers", (_Answers,), {"parents": parents}))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/", parents
    server.shutdown()
    thread.join()
    server.server_close()


class Remote(Dataset[Tensor]):
    """Two rows from a web server and a database."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.database = sqlite3.connect(":memory:")

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        logging.getLogger("rows").warning("row %d", index)
        assert requests.get(self.url, timeout=10).ok
        (value,) = self.database.cursor().execute("select 1").fetchone()
        return torch.full((4,), float(value))


class Looks(nn.Module):
    """A layer that reads a database and the web."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.url, self.database = url, sqlite3.connect(":memory:")

    def forward(self, x: Tensor) -> Tensor:
        logging.getLogger("layer").warning("in forward")
        self.database.cursor().execute("select 2").fetchone()
        requests.get(self.url, timeout=10)
        return self.linear(x)  # type: ignore[no-any-return] # torch has it so


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """Gather log records with the ids that the instrumentation puts on them."""
    LoggingInstrumentor().instrument(inject_trace_context=True)
    gathered: list[logging.LogRecord] = []

    class Gathers(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            gathered.append(record)

    handler = Gathers()
    loggers = [logging.getLogger(name) for name in ("rows", "layer")]
    for logger in loggers:
        logger.addHandler(handler)
    yield gathered
    for logger in loggers:
        logger.removeHandler(handler)
    LoggingInstrumentor().uninstrument()


@pytest.mark.parametrize("engine", ENGINES)
def test_requests_sqlite_and_logging_join_the_step(
    engine: str, site: tuple[str, list[str]], records: list[logging.LogRecord]
) -> None:
    """In the dataset they are the step's that the fetch opens, in the forward the module's; the web server is told."""
    url, traceparents = site
    with looked(engine) as look, _instrumented(look):
        model = nn.Sequential(Looks(url), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in DataLoader(Remote(url)):
            model(batch).sum().backward()
            optimizer.step()
    step = ["torch.step"]
    layer = ["forward 0", "forward Sequential", "torch.forward", "torch.step"]
    assert sorted(look.above("select")) == sorted([step, layer] * 2)
    assert sorted(look.above("GET")) == sorted([step, layer] * 2)
    spoken = [(record.getMessage(), look.spans[vars(record)["otelSpanID"]][0]) for record in records]
    assert spoken == [
        ("row 0", "torch.step"),
        ("in forward", "forward 0"),
        ("row 1", "torch.step"),
        ("in forward", "forward 0"),
    ]
    assert all(vars(record)["otelTraceSampled"] for record in records)
    assert [look.spans[parent.split("-")[2]][0] for parent in traceparents] == ["GET"] * 4
    steps = [names for names in look.traces.values() if "torch.step" in names]
    assert len(steps) == 2
    assert all({"select", "GET"} <= names for names in steps)


class _instrumented:  # noqa: N801  # reads as a function
    """Instrument requests and sqlite3 with the user's tracer for the block."""

    def __init__(self, look: Look) -> None:
        self.look = look

    def __enter__(self) -> None:
        RequestsInstrumentor().instrument(tracer_provider=self.look.provider)
        SQLite3Instrumentor().instrument(tracer_provider=self.look.provider)

    def __exit__(self, *_: object) -> None:
        RequestsInstrumentor().uninstrument()
        SQLite3Instrumentor().uninstrument()
