"""Span processors of the user's provider get the baggage that was current when a step or an evaluation began."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from opentelemetry import baggage, trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.sdk.trace import Span, SpanProcessor, TracerProvider
from torch import nn

import torchotel

Seen = list[tuple[str, Mapping[str, object]]]


class Starts(SpanProcessor):
    """Remember the baggage at the start of each torchotel span."""

    def __init__(self) -> None:
        self.traces: dict[int, Seen] = {}

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        found = dict(baggage.get_all(parent_context or Context()))
        self.traces.setdefault(span.get_span_context().trace_id, []).append((span.name, found))


@contextmanager
def _baggage(name: str, value: str) -> Iterator[None]:
    token = attach(baggage.set_baggage(name, value))
    try:
        yield
    finally:
        detach(token)


def _starts(program: Callable[[trace.Tracer], None]) -> Seen:
    provider, starts = TracerProvider(), Starts()
    provider.add_span_processor(starts)
    with torchotel.instrument(tracer_provider=provider, metrics_exporter="none", detail="all") as handle:
        program(provider.get_tracer("user"))
        handle.flush()
        assert handle.stats()["internal_errors"] == 0
    return [(name, found) for seen in starts.traces.values() for name, found in seen if name != "torch.run"]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.rand(2, 3)).sum().backward()
    optimizer.step()


def test_gives_each_span_of_a_step_the_baggage_at_its_start() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def program(_: trace.Tracer) -> None:
        for user in ("alice", "bob"):
            with _baggage("user", user):
                model(torch.rand(2, 3)).sum().backward()
                with _baggage("user", "too late"):
                    optimizer.step()
        _step(model, optimizer)

    seen = _starts(program)
    steps: list[Seen] = []
    for name, found in seen:
        if name == "torch.step":
            steps.append([])
        steps[-1].append((name, found))
    expected = [{"user": "alice"}, {"user": "bob"}, {}]
    assert [[found for _, found in step] for step in steps] == [
        [one] * len(step) for one, step in zip(expected, steps, strict=True)
    ]
    assert {"forward Linear", "backward Linear", "torch.optimizer.step"} <= {name for name, _ in steps[1]}


def test_gives_a_span_that_is_asked_for_while_it_runs_the_same() -> None:
    """It starts at once, and the step's other spans when they are replayed."""

    class Asks(nn.Module):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            assert trace.get_current_span().get_span_context().is_valid
            with _baggage("user", "too late"):
                return batch.square()

    model = nn.Sequential(nn.Linear(3, 1), Asks())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def program(_: trace.Tracer) -> None:
        with _baggage("user", "alice"):
            _step(model, optimizer)

    seen = _starts(program)
    assert {"torch.step", "forward Sequential", "forward 1", "backward 0"} <= {name for name, _ in seen}
    assert {tuple(found.items()) for _, found in seen} == {(("user", "alice"),)}


def test_gives_a_request_its_own() -> None:
    model = nn.Linear(3, 1)

    def program(tracer: trace.Tracer) -> None:
        for user in ("alice", "bob"):
            with tracer.start_as_current_span(user), _baggage("user", user), torch.inference_mode():
                model(torch.rand(2, 3))

    seen = [one for one in _starts(program) if one[0] not in {"alice", "bob"}]
    assert seen == [
        (name, {"user": user}) for user in ("alice", "bob") for name in ("torch.evaluation", "forward Linear")
    ]
