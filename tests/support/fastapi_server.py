"""A FastAPI application on a real uvicorn, its requests the spans of OpenTelemetry's own instrumentation."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import torch
import uvicorn
from fastapi import FastAPI
from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
from torch import Tensor, nn

from support.both_exports import Look

ROW = torch.ones(1, 4)
WAIT_S = 30


class Net(nn.Module):
    """A small model."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.scores = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.scores(torch.relu(self.hidden(x)))
        return scores


@torch.inference_mode()
def predict(model: nn.Module, row: Tensor = ROW) -> list[float]:
    """Answer as an endpoint does."""
    return model(row)[0].tolist()  # type: ignore[no-any-return] # torch has it so


@contextmanager
def served(app: FastAPI, look: Look) -> Iterator[httpx.Client]:
    """Serve on the loopback, every request a span of the look's provider; give a client."""
    FastAPIInstrumentor.instrument_app(app, tracer_provider=look.provider, exclude_spans=["receive", "send"])
    server = uvicorn.Server(uvicorn.Config(app, log_config=None))
    with socket.create_server(("127.0.0.1", 0)) as listening:  # it takes connections before the server is up
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            host, port = listening.getsockname()
            each_its_own = httpx.Limits(max_keepalive_connections=0)  # after an error uvicorn closes the connection
            with httpx.Client(base_url=f"http://{host}:{port}", timeout=60, limits=each_its_own) as client:
                yield client
        finally:
            server.should_exit = True
            thread.join()
            FastAPIInstrumentor.uninstrument_app(app)


def above_evaluations(look: Look) -> list[list[str]]:
    """Give what is above each evaluation, in the order of names."""
    return sorted(look.above("torch.evaluation"))
