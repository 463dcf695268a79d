"""Endpoints of every kind: the request's span holds the evaluation, which holds the model and its layers."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any

import pytest
from fastapi import FastAPI
from opentelemetry.instrumentation.threading import ThreadingInstrumentor
from opentelemetry.trace import StatusCode
from support.both_exports import ENGINES, looked
from support.fastapi_server import ROW, Net, above_evaluations, predict, served
from torch import nn

LAYERS = Counter(["forward Net", "forward hidden", "forward scores"])
Endpoint = Callable[[], list[float]] | Callable[[], Coroutine[Any, Any, list[float]]]


def in_a_pool_thread(model: nn.Module) -> Endpoint:
    return lambda: predict(model)


def on_the_event_loop(model: nn.Module) -> Endpoint:
    async def endpoint() -> list[float]:
        return predict(model)

    return endpoint


def to_thread(model: nn.Module) -> Endpoint:
    async def endpoint() -> list[float]:
        return await asyncio.to_thread(predict, model)

    return endpoint


def in_executor(model: nn.Module) -> Endpoint:
    async def endpoint() -> list[float]:
        return await asyncio.get_running_loop().run_in_executor(None, predict, model)

    return endpoint


def in_executor_with_context(model: nn.Module) -> Endpoint:
    async def endpoint() -> list[float]:
        return await asyncio.get_running_loop().run_in_executor(None, partial(copy_context().run, predict, model))

    return endpoint


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("make", [in_a_pool_thread, on_the_event_loop, to_thread, in_executor_with_context])
def test_a_request_holds_what_its_model_did(make: Callable[[nn.Module], Endpoint], engine: str) -> None:
    """Request, evaluation, model and layers are one trace, by whichever exporter they leave."""
    app = FastAPI()
    app.get("/predict")(make(Net()))
    with looked(engine) as look, served(app, look) as client:
        for _ in range(3):
            assert client.get("/predict").status_code == 200
    request = ["torch.evaluation", "GET /predict"]
    assert look.above("forward hidden") == look.above("forward scores") == [["forward Net", *request]] * 3
    assert list(look.counts.values()) == [LAYERS + Counter(["GET /predict", "torch.evaluation"])] * 3


@pytest.mark.parametrize("engine", ENGINES)
def test_an_executor_carries_no_context(engine: str) -> None:
    """So the evaluation is a trace of its own."""
    app = FastAPI()
    app.get("/predict")(in_executor(Net()))
    with looked(engine) as look, served(app, look) as client:
        client.get("/predict")
    assert above_evaluations(look) == [[]]
    assert len(look.traces) == 2


@pytest.mark.parametrize("engine", ENGINES)
def test_opentelemetrys_own_instrumentation_of_threads_carries_it(engine: str) -> None:
    """With it in, an executor's work is the request's, and so is that of a thread that the endpoint starts."""
    app, model = FastAPI(), Net()
    app.get("/executor")(in_executor(model))

    @app.get("/thread")
    def starts_a_thread() -> None:
        thread = threading.Thread(target=predict, args=(model,))
        thread.start()
        thread.join()

    ThreadingInstrumentor().instrument()
    try:
        with looked(engine) as look, served(app, look) as client:
            assert [client.get(path).status_code for path in ("/executor", "/thread")] == [200, 200]
    finally:
        ThreadingInstrumentor().uninstrument()
    assert above_evaluations(look) == [["GET /executor"], ["GET /thread"]]


class First(Net):
    """A model that is served beside another."""


class Second(nn.Module):
    """One with more layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))

    def forward(self, x: Any) -> Any:
        return self.blocks(x)


@pytest.mark.parametrize("engine", ENGINES)
def test_requests_at_once_are_not_mixed(engine: str) -> None:
    """16 clients, 200 requests, two models: each trace has its own evaluation and a span for each module called."""
    first, second, app = First(), Second(), FastAPI()
    routes = {
        "/first": ["torch.evaluation", "forward First", "forward hidden", "forward scores"],
        "/second": ["torch.evaluation", "forward Second", "forward blocks", *(f"forward blocks.{i}" for i in range(6))],
        "/both": [],
    }
    routes["/both"] = routes["/first"] + routes["/second"]
    app.get("/first")(lambda: predict(first))
    app.get("/second")(on_the_event_loop(second))
    app.get("/both")(lambda: predict(second) + predict(first))
    with looked(engine) as look, served(app, look) as client, ThreadPoolExecutor(16) as clients:
        paths = list(routes) * 67
        statuses = list(clients.map(lambda path: client.get(path).status_code, paths[:200]))
    assert statuses == [200] * 200
    expected = [sorted([f"GET {path}", *routes[path]]) for path in paths[:200]]
    assert sorted(sorted(counts.elements()) for counts in look.counts.values()) == sorted(expected)
    assert {tuple(above[-2:]) for above in look.above("forward blocks.5")} == {
        ("torch.evaluation", "GET /second"),
        ("torch.evaluation", "GET /both"),
    }


@pytest.mark.parametrize("detail", [3, "auto"])
def test_detail_is_a_share_of_evaluations_and_none_is_missing(detail: str | int) -> None:
    """Every third, or the first ten and then few; every request at once with others has its evaluation."""
    app, model = FastAPI(), Net()
    app.get("/predict")(lambda: predict(model))
    with looked("sdk", detail=detail) as look, served(app, look) as client, ThreadPoolExecutor(8) as clients:
        assert {client.get("/predict").status_code for _ in range(30)} == {200}
        list(clients.map(lambda _: client.get("/predict"), range(60)))
    plain = Counter(["GET /predict", "torch.evaluation"])
    assert all(counts in (plain, plain + LAYERS) for counts in look.counts.values())
    assert len(look.counts) == 90
    detailed = sum(counts == plain + LAYERS for counts in look.counts.values())
    assert 10 <= detailed < 60


@pytest.mark.parametrize("engine", ENGINES)
def test_a_request_that_is_sampled_out_counts_all_the_same(engine: str) -> None:
    """Its trace has neither evaluation nor modules, by the caller's decision."""
    app, model = FastAPI(), Net()
    app.get("/predict")(lambda: predict(model))
    with looked(engine) as look, served(app, look) as client:
        for sampled in ("00", "01"):
            client.get("/predict", headers={"traceparent": f"00-{'1' * 30}{sampled}-{'2' * 16}-{sampled}"})
    assert set(look.counts) == {"1" * 30 + "01"}
    assert look.handle.stats()["evaluations"] == 2


def test_a_request_that_fails_inside_the_model() -> None:
    """The layer that raised, what holds it and the request are failed, with the exception; the next request is not."""
    app, model = FastAPI(), Net()

    @app.get("/{columns}")
    def endpoint(columns: int) -> list[float]:
        return predict(model, ROW[:, :columns])

    with looked("sdk") as look, served(app, look) as client:
        assert [client.get(path).status_code for path in ("/3", "/4")] == [500, 200]
    spans = look.exporter.get_finished_spans()
    failed = [span for span in spans if span.status.status_code is StatusCode.ERROR]
    assert {span.name for span in failed} == {"GET /{columns}", "torch.evaluation", "forward Net", "forward hidden"}
    assert len({span.context.trace_id for span in failed if span.context is not None}) == 1
    types = [event.attributes["exception.type"] for span in failed for event in span.events if event.attributes]
    assert set(types) == {"RuntimeError"}
    assert len(look.above("forward scores")) == 1
