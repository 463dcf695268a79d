"""Evaluations under a span of the user's, with a real SDK and a real receiver."""

import threading
from collections import Counter
from contextvars import copy_context
from typing import Any

import pytest
import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from support.otlp_http_receiver import receiver
from support.recorded_training import Seen, recorded
from torch import nn

import torchotel
from torchotel._limits import MAX_FOLLOWING_EVALUATIONS
from torchotel._records import SpanReference, StepRecord
from torchotel.testing import Captured, capture
from torchotel.tracing.evaluation_folding import MAX_SPANS, EvaluationFold


def test_generation_under_a_request() -> None:
    """Forwards of a request are children of its span: the first ten as they are, the rest as one."""
    net = nn.Linear(4, 4)
    tracer = TracerProvider().get_tracer("test")
    with receiver() as server:
        handle = torchotel.instrument(endpoint=server.url.removesuffix("/v1/traces"), detail="off")
        with torch.no_grad():
            for _ in range(2):
                with tracer.start_as_current_span("request") as span:
                    for _ in range(25):
                        net(torch.randn(1, 4))
        handle.shutdown()
        seen = [Seen(one) for one in server.spans]
    context = span.get_span_context()
    ours = [one for one in seen if one.span.trace_id == context.trace_id.to_bytes(16, "big")]
    assert len(ours) == 11
    assert {one.span.parent_span_id for one in ours} == {context.span_id.to_bytes(8, "big")}
    assert [one.attributes.get("torch.folded.evaluations") for one in ours] == [None] * 10 + [15]
    assert len(seen) == 22
    assert handle.stats()["evaluations"] == 50


@torch.no_grad()
def forwards(net: nn.Module, count: int) -> None:
    """Generate, or do what else takes many forwards."""
    for _ in range(count):
        net(torch.ones(1, 4))


def folded_evaluations(captured: Captured) -> list[Any]:
    """Give for each evaluation how many it stands for; None: itself."""
    return [one.attributes.get("torch.folded.evaluations") for one in captured.evaluations]


def test_requests_that_take_turns_on_a_thread_fold_each_into_its_own() -> None:
    """As those of one event loop do, which generate a token each time that it is their turn."""
    net, tracer = nn.Linear(4, 4), TracerProvider().get_tracer("test")
    requests = [tracer.start_span(f"request {number}") for number in range(3)]
    with capture(detail="off") as captured:
        for _ in range(25):
            for request in requests:
                with trace.use_span(request):
                    forwards(net, 1)
        assert folded_evaluations(captured) == [None] * 30 + [15] * 3
    traces = Counter(one.trace_id for one in captured.evaluations)
    assert traces == {request.get_span_context().trace_id: 11 for request in requests}


def test_a_request_whose_forwards_run_on_several_threads_folds_as_one() -> None:
    """As those of a streamed answer do, each on whichever thread is free."""
    net, tracer = nn.Linear(4, 4), TracerProvider().get_tracer("test")
    with capture(detail="off") as captured:
        with tracer.start_as_current_span("request"):
            for _ in range(25):
                thread = threading.Thread(target=copy_context().run, args=(forwards, net, 1))
                thread.start()
                thread.join()
        assert folded_evaluations(captured) == [None] * 10 + [15]


def test_what_is_folded_is_sent_soon() -> None:
    """Though no other request comes for hours."""
    net, tracer = nn.Linear(4, 4), TracerProvider().get_tracer("test")
    with receiver() as server:
        with torchotel.instrument(endpoint=server.url.removesuffix("/v1/traces"), detail="off"):
            with tracer.start_as_current_span("request"):
                forwards(net, 25)
            server.wait_for(11)
        assert len(server.spans) == 11


def test_a_span_that_was_forgotten_takes_what_was_folded_along() -> None:
    """So many requests at a time that not all are remembered lose nothing."""
    fold = EvaluationFold()
    once = [evaluation_of(1) for _ in range(MAX_FOLLOWING_EVALUATIONS)]
    assert [fold.add(unit) for unit in once] == [[unit] for unit in once]
    assert [fold.add(evaluation_of(1)) for _ in range(5)] == [[]] * 5
    ready = [unit for span in range(2, MAX_SPANS + 2) for unit in fold.add(evaluation_of(span))]
    assert [unit.folded for unit in ready if unit.folded] == [5]
    assert len(ready) == MAX_SPANS + 1
    assert fold.pop_all() == []


def evaluation_of(span: int) -> StepRecord:
    reference = SpanReference(span, span, sampled=True)
    return StepRecord("evaluation", 0, 0, 1, 0, 0, detailed=False, user_span=reference, grad=False)


def test_a_forward_that_fails_is_not_folded() -> None:
    """It says in which module."""
    net, tracer = nn.Sequential(nn.Linear(4, 4)), TracerProvider().get_tracer("test")
    with capture(detail="all") as captured:
        with tracer.start_as_current_span("request"), torch.no_grad():
            forwards(net, 25)
            with pytest.raises(RuntimeError):
                net(torch.ones(1, 3))
        assert folded_evaluations(captured) == [None] * 11 + [15]
        failed = captured.evaluations[10]
    assert failed.error is not None
    assert failed.find("forward 0").error == failed.error


def test_evaluations_of_a_request_share_the_spans_that_its_trace_may_have() -> None:
    """The first is whole; when there are no more, each says how many calls it had and how long they took."""
    net, tracer = nn.Sequential(*(nn.Linear(4, 4) for _ in range(9))), TracerProvider().get_tracer("test")
    with capture(detail="all", max_spans=24) as captured:
        for _ in range(2):
            with tracer.start_as_current_span("request"):
                forwards(net, 5)
        first, second, third, *rest = captured.evaluations[:5]
        again = captured.evaluations[5]
    assert [len(list(one.walk())) for one in (first, second, third, *rest, again)] == [11, 11, 2, 1, 1, 11]
    assert third.find("forward Sequential").attributes["torch.folded.calls"] == 9
    assert [one.attributes["torch.folded.calls"] for one in rest] == [10, 10]
    assert folded_evaluations(captured) == [None] * 10
    assert all(0 < float(str(one.attributes["torch.folded.time"])) <= one.duration_s for one in rest)


def test_a_request_that_is_sampled_out() -> None:
    """Evaluations of a request that its sampler left out are left out too, and counted."""
    net = nn.Linear(4, 4)
    tracer = TracerProvider(sampler=ALWAYS_OFF).get_tracer("test")
    with receiver() as server:
        handle = torchotel.instrument(endpoint=server.url.removesuffix("/v1/traces"), detail="off")
        with torch.no_grad(), tracer.start_as_current_span("request"):
            net(torch.randn(1, 4))
        handle.shutdown()
        assert server.spans == []
    stats = handle.stats()
    assert stats["spans_recorded"] == stats["spans_sampled_out"] == 1


def test_a_step_links_to_the_span_around_it() -> None:
    """A training step is a trace of its own that links to the user's span."""
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    tracer = TracerProvider().get_tracer("test")
    with recorded("off") as run, tracer.start_as_current_span("fit") as span:
        net(torch.randn(1, 4)).sum().backward()
        optimizer.step()
    links = [link.span_id for link in run.steps[0].children[0].span.links]
    assert span.get_span_context().span_id.to_bytes(8, "big") in links
    assert len(links) == 2  # and to torch.run
