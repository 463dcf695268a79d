"""A provider that is given gets every span, and has its way with them."""

import itertools
import threading
from collections.abc import Iterator
from typing import Literal

import pytest
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Sampler, TraceIdRatioBased
from opentelemetry.trace import Tracer
from support.otlp_http_receiver import Receiver
from support.recorded_training import train

import torchotel


@pytest.fixture
def kept() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(kept: InMemorySpanExporter) -> Iterator[TracerProvider]:
    yield from _provider(kept)


def _provider(exporter: SpanExporter, **settings: object) -> Iterator[TracerProvider]:
    provider = TracerProvider(shutdown_on_exit=False, **settings)  # type: ignore[arg-type]  # the test's own words
    provider.add_span_processor(BatchSpanProcessor(exporter))
    yield provider
    provider.shutdown()


def test_a_given_provider_gets_all(provider: TracerProvider, kept: InMemorySpanExporter, server: Receiver) -> None:
    """Every span goes through it, none to the endpoint, and all are counted; it lives on."""
    endpoint = server.url.removesuffix("/v1/traces")
    handle = torchotel.instrument(
        tracer_provider=provider, endpoint=endpoint, detail="all", metrics_exporter="none", shapes=False
    )
    train()
    assert handle.flush()
    spans = kept.get_finished_spans()
    stats = handle.stats()
    assert len(spans) == stats["spans_recorded"] == stats["spans_exported"] == 33
    handle.shutdown()
    provider.get_tracer("user").start_span("later").end()
    provider.force_flush()
    assert [span.name for span in kept.get_finished_spans()[33:]] == ["later"]
    assert server.requests == []


def test_roots_say_whose_they_are(
    provider: TracerProvider, kept: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The provider's resource does not know rank and run, so `torch.run`, steps and evaluations carry them."""
    for name, text in {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "job-7"}.items():
        monkeypatch.setenv(name, text)
    with torchotel.instrument(tracer_provider=provider, detail="all", metrics_exporter="none") as handle:
        train(2)
        with torch.no_grad():
            torch.nn.Linear(4, 1)(torch.ones(1, 4))
        assert handle.flush()
    identity = {"torch.rank": 0, "torch.world_size": 2, "torch.run.id": "job-7"}
    found = {
        (span.name, span.parent is None): {
            name: value for name, value in (span.attributes or {}).items() if name in identity
        }
        for span in kept.get_finished_spans()
    }
    assert {name for name, root in found if root} == {"torch.run", "torch.step", "torch.evaluation"}
    assert all(attributes == (identity if root else {}) for (_, root), attributes in found.items())


def test_span_ids_may_count_up(kept: InMemorySpanExporter) -> None:
    """Each span is exported once and below its own parent with a generator whose ids are 1, 2, 3, …"""
    model, x = ScaledBySpan(), torch.ones(2, 4)
    for provider in _provider(kept, id_generator=Counting()):
        model.tracer = provider.get_tracer("user")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torchotel.instrument(tracer_provider=provider, detail="all", metrics_exporter="none") as handle:
            for _ in range(3):
                model(x).sum().backward()
                optimizer.step()
            assert handle.flush()
            stats = handle.stats()
        spans = kept.get_finished_spans()
    name_of = {span.context.span_id: span.name for span in spans}
    ours = [span for span in spans if span.name != "inside"]
    assert len(name_of) == len(spans)
    assert (len(ours), stats["spans_dropped"]) == (stats["spans_recorded"], 0)
    assert {(span.name, name_of[span.parent.span_id] if span.parent else None) for span in spans} == {
        ("torch.run", None),
        ("torch.step", None),
        ("torch.between", "torch.step"),
        ("torch.forward", "torch.step"),
        ("torch.backward", "torch.step"),
        ("torch.optimizer.step", "torch.step"),
        ("forward ScaledBySpan", "torch.forward"),
        ("forward inner", "forward ScaledBySpan"),
        ("inside", "forward ScaledBySpan"),
        ("backward ScaledBySpan", "torch.backward"),
        ("backward inner", "backward ScaledBySpan"),
    }


class Counting(IdGenerator):
    """Gives the ids 1, 2, 3, …, as those of test suites do."""

    def __init__(self) -> None:
        self._count = itertools.count(1)

    def generate_span_id(self) -> int:
        """Return the next number."""
        return next(self._count)

    generate_trace_id = generate_span_id


class ScaledBySpan(torch.nn.Module):
    """A module whose forward begins a span of the user's."""

    tracer: Tracer

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call the inner module, and double what it gives in a span."""
        y: torch.Tensor = self.inner(x)
        with self.tracer.start_as_current_span("inside"):
            return 2 * y


def test_none_beats_a_provider(provider: TracerProvider, kept: InMemorySpanExporter) -> None:
    """With `traces_exporter="none"` nothing is replayed."""
    with torchotel.instrument(tracer_provider=provider, traces_exporter="none", metrics_exporter="none"):
        train()
    provider.force_flush()
    assert kept.get_finished_spans() == ()


@pytest.mark.parametrize("detail", ["all", "off"])
@pytest.mark.parametrize(("sampler", "fewest", "most"), [(ALWAYS_OFF, 0, 0), (TraceIdRatioBased(0.5), 5, 35)])
def test_what_a_sampler_leaves_out_is_counted(
    kept: InMemorySpanExporter, detail: Literal["all", "off"], sampler: Sampler, fewest: int, most: int
) -> None:
    """A trace is taken or not as a whole; whatever was recorded was exported or sampled out."""
    for provider in _provider(kept, sampler=sampler):
        handle = torchotel.instrument(tracer_provider=provider, detail=detail, metrics_exporter="none")
        train(40)
        handle.shutdown()
        stats = handle.stats()
        spans = kept.get_finished_spans()
        assert stats["spans_exported"] == len(spans)
        assert stats["spans_recorded"] == stats["spans_exported"] + stats["spans_sampled_out"]
        assert fewest <= sum(span.name == "torch.step" for span in spans) <= most


def test_an_exporter_that_hangs_does_not_hold_the_program() -> None:
    """Training and `shutdown` go on while the provider's exporter waits for its answer."""

    answer, gave_up = threading.Event(), threading.Event()

    class Hanging(SpanExporter):
        def export(self, spans: object) -> SpanExportResult:
            if not answer.wait(60):
                gave_up.set()
            return SpanExportResult.FAILURE

    for provider in _provider(Hanging()):
        handle = torchotel.instrument(tracer_provider=provider, detail="all", metrics_exporter="none")
        train(5)
        handle.shutdown(timeout_s=0.1)
        assert not gave_up.is_set()
        answer.set()
    stats = handle.stats()
    assert stats["spans_recorded"] == stats["spans_exported"] + stats["spans_dropped"] > 0
