"""Evaluations under a span of the user's, with a real SDK and a real receiver."""

import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from receiver import receiver
from support import Seen, recorded
from torch import nn

import torchotel


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
    assert [one.attributes.get("torch.folded.calls") for one in ours] == [None] * 10 + [15]
    assert len(seen) == 22
    assert handle.stats()["evaluations"] == 50


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
