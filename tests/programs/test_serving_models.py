"""Models that are not called as they were written: compiled, scripted, exported, or no module inside."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from opentelemetry.sdk.trace import TracerProvider
from support.fastapi_server import ROW, Net, predict
from support.recorded_training import tree
from torch import Tensor, nn

from torchotel.testing import CapturedSpan, capture


def in_requests(model: nn.Module, count: int = 2, **settings: Any) -> list[CapturedSpan]:
    """Ask a model under spans of requests; give what each request's trace has of it."""
    tracer = TracerProvider().get_tracer("test")
    requests = []
    with capture(**settings) as captured:
        for _ in range(count):
            with tracer.start_as_current_span("request") as request:
                predict(model)
            requests.append(request.get_span_context().trace_id)
    assert [one.trace_id for one in captured.evaluations] == requests
    return captured.evaluations


class Session(nn.Module):
    """Stands between the program and an engine of another make, such as ONNX Runtime's session."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy().sum(axis=1, keepdims=True))


def compiled() -> Any:
    return torch.compile(Net().eval(), backend="eager")


class Kind(NamedTuple):
    """A model and what its call is seen as."""

    make: Callable[[], Any]
    seen: Any


KINDS = {
    "compiled": Kind(compiled, "forward Net"),
    "scripted": Kind(lambda: torch.jit.script(Net().eval()), "forward RecursiveScriptModule"),
    "traced": Kind(lambda: torch.jit.trace(Net().eval(), ROW), "forward TopLevelTracedModule"),
    "exported": Kind(
        lambda: torch.export.export(Net().eval(), (ROW,)).module(),
        ("forward GraphModule", ["forward _guards_fn"]),  # the check of its inputs, which torch.export adds
    ),
    "another engine": Kind(Session, "forward Session"),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch.jit
@pytest.mark.parametrize("detail", ["all", "off"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_model_that_calls_no_layers_is_one_span(kind: Kind, detail: str) -> None:
    """Its call is there in each request; what nothing calls can't be."""
    expected = ("torch.evaluation", [kind.seen]) if detail == "all" else "torch.evaluation"
    assert [tree(one) for one in in_requests(kind.make(), detail=detail)] == [expected] * 2


def test_a_compiled_model_is_marked() -> None:
    """Whoever looks for its layers is told why there are none."""
    (evaluation,) = in_requests(compiled(), count=1)
    assert evaluation.find("forward Net").attributes["torch.compiled"] is True


@pytest.mark.parametrize("detail", ["all", 2])
def test_a_compiled_model_that_several_threads_serve(detail: str | int) -> None:
    """Each request has its evaluation, and those in detail one region each, where it was compiled before they came."""
    model, tracer = compiled(), TracerProvider().get_tracer("test")

    def request(_: int) -> int:
        with tracer.start_as_current_span("request") as span:
            predict(model)
        return span.get_span_context().trace_id

    with capture(detail=detail) as captured, ThreadPoolExecutor(4) as pool:
        predict(model)  # while anything is compiled no other thread's forward is seen
        requests = list(pool.map(request, range(40)))
    served = [one for one in captured.evaluations if one.trace_id in requests]
    assert sorted(one.trace_id for one in served) == sorted(requests)
    trees = [tree(one) for one in served]
    detailed = trees.count(("torch.evaluation", ["forward Net"]))
    assert detailed + trees.count("torch.evaluation") == 40
    assert detailed == 40 if detail == "all" else 0 < detailed < 40
