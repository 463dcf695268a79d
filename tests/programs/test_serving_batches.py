"""Requests that share a forward, that take many, that are left alone, and what runs before any comes."""

import asyncio
import queue
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from fastapi import BackgroundTasks, FastAPI
from fastapi.responses import StreamingResponse
from opentelemetry import trace
from opentelemetry.trace import Link, SpanContext
from support.both_exports import ENGINES, Look, looked
from support.fastapi_server import ROW, WAIT_S, Net, above_evaluations, predict, served
from torch import Tensor, nn

TOKENS = 25


class Waiting(NamedTuple):
    """A request that waits for its row of a batch."""

    row: Tensor
    caller: SpanContext
    answer: Future[list[float]]


class Batcher:
    """Serve three requests in one forward, on a thread of its own."""

    def __init__(self, model: nn.Module, look: Look, *, links: bool) -> None:
        self.waiting: queue.SimpleQueue[Waiting] = queue.SimpleQueue()
        self.model, self.look, self.links = model, look, links
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        batch = [self.waiting.get(timeout=WAIT_S) for _ in range(3)]
        if not self.links:
            return self.answer(batch)
        with self.look.tracer.start_as_current_span("batch", links=[Link(one.caller) for one in batch]):
            return self.answer(batch)

    @torch.inference_mode()
    def answer(self, batch: list[Waiting]) -> None:
        for one, row in zip(batch, self.model(torch.cat([one.row for one in batch])), strict=True):
            one.answer.set_result(row.tolist())

    def ask(self, row: Tensor) -> list[float]:
        answer: Future[list[float]] = Future()
        self.waiting.put(Waiting(row, trace.get_current_span().get_span_context(), answer))
        return answer.result(WAIT_S)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("links", [True, False])
def test_a_batch_is_a_trace_of_its_own(engine: str, *, links: bool) -> None:
    """Nobody's request is its parent; a span that the program opens around it can link to all of them."""
    app = FastAPI()
    with looked(engine) as look:
        batcher = Batcher(Net(), look, links=links)
        app.get("/predict")(lambda: batcher.ask(ROW))
        with served(app, look) as client, ThreadPoolExecutor(3) as clients:
            batcher.thread.start()
            answers = list(clients.map(lambda _: client.get("/predict").json(), range(3)))
            batcher.thread.join()
    assert answers == [answers[0]] * 3
    assert above_evaluations(look) == [["batch"] if links else []]
    assert look.above("forward hidden") == [["forward Net", "torch.evaluation", *(["batch"] if links else [])]]
    spans = look.exporter.get_finished_spans()
    requests = {span.context.span_id for span in spans if span.name == "GET /predict" and span.context is not None}
    linked = {link.context.span_id for span in spans if span.name == "batch" for link in span.links}
    assert linked == (requests if links else set())


def tokens(model: nn.Module) -> Iterator[bytes]:
    """Yield a token for each forward; gradients are off on whichever thread asks for the next."""
    for _ in range(TOKENS):
        yield str(predict(model)).encode()


def tokens_in_turns() -> Callable[[nn.Module], AsyncIterator[bytes]]:
    """Do so on the event loop, each of three requests a token in turn."""
    turn = asyncio.Barrier(3)

    async def stream(model: nn.Module) -> AsyncIterator[bytes]:
        for token in tokens(model):
            await turn.wait()
            yield token

    return stream


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("make", [lambda: tokens, tokens_in_turns], ids=["on any thread", "in turns on one"])
def test_streamed_answers_fold_each_into_its_own_request(make: Callable[[], Any], engine: str) -> None:
    """Ten evaluations and one for the others, whichever threads run them and however requests take turns."""
    app, model, stream = FastAPI(), Net(), make()
    app.get("/stream")(lambda: StreamingResponse(stream(model)))
    with looked(engine) as look, served(app, look) as client, ThreadPoolExecutor(3) as clients:
        bodies = list(clients.map(lambda _: client.get("/stream").content, range(3)))
    assert [body.count(b"]") for body in bodies] == [TOKENS] * 3
    assert above_evaluations(look) == [["GET /stream"]] * 3 * 11
    assert [counts["torch.evaluation"] for counts in look.counts.values()] == [11] * 3


def test_a_client_that_goes_away_amid_a_stream() -> None:
    """What was computed for it is in its trace, and the next request has its own."""
    app, model = FastAPI(), Net()

    def endless() -> Iterator[bytes]:
        while True:  # the server ends when this has
            yield from tokens(model)

    app.get("/endless")(lambda: StreamingResponse(endless()))
    app.get("/predict")(lambda: predict(model))
    with looked("otlp", detail="off") as look, served(app, look) as client:
        with client.stream("GET", "/endless") as answer:
            assert next(answer.iter_bytes())
        client.get("/predict")
    assert {tuple(above) for above in look.above("torch.evaluation")} == {("GET /endless",), ("GET /predict",)}
    assert look.above("torch.evaluation").count(["GET /predict"]) == 1


def test_a_client_that_goes_away_amid_a_forward() -> None:
    """The forward goes on to its end, in the trace of its request."""
    app, model = FastAPI(), Net()
    inside, may_go_on = threading.Event(), threading.Event()

    def waits(*_: object) -> None:
        inside.set()
        assert may_go_on.wait(WAIT_S)

    model.hidden.register_forward_hook(waits)
    app.get("/predict")(lambda: predict(model))
    with looked("otlp") as look, served(app, look) as client:
        address = client.base_url.host, client.base_url.port
        with socket.create_connection(address) as connection:
            connection.sendall(b"GET /predict HTTP/1.1\r\nHost: here\r\n\r\n")
            assert inside.wait(WAIT_S)
        may_go_on.set()
        client.get("/predict")
    assert look.above("forward scores") == [["forward Net", "torch.evaluation", "GET /predict"]] * 2
    assert len(look.traces) == 2


def test_what_runs_after_the_answer_is_the_requests() -> None:
    """A background task stands below its own span; a task that a request starts has that request's context for good."""
    app, model, tasks = FastAPI(), Net(), list[asyncio.Task[None]]()

    @app.get("/later")
    def later(after: BackgroundTasks) -> None:
        after.add_task(predict, model)

    @app.get("/starts")
    async def starts() -> None:
        async def works() -> None:
            predict(model)

        tasks.append(asyncio.create_task(works()))

    with looked("otlp") as look, served(app, look) as client:
        assert [client.get(path).status_code for path in ("/later", "/starts")] == [200, 200]
    assert above_evaluations(look) == [["BackgroundTask predict", "GET /later"], ["GET /starts"]]


def test_loading_a_model_makes_no_trace(tmp_path: Path) -> None:
    """Building it, reading its weights and setting its mode; the first trace is the first request's."""
    torch.save(Net().state_dict(), tmp_path / "weights.pt")
    models: list[nn.Module] = []

    @asynccontextmanager
    async def load(_: FastAPI) -> AsyncIterator[None]:
        model = Net()
        model.load_state_dict(torch.load(tmp_path / "weights.pt"))
        models.append(model.to(torch.float32).eval().requires_grad_(requires_grad=False))
        yield

    app = FastAPI(lifespan=load)
    app.get("/predict")(lambda: predict(models[0]))
    with looked("otlp") as look, served(app, look) as client:
        client.get("/predict")
    assert len(look.traces) == 1
    assert above_evaluations(look) == [["GET /predict"]]
