"""Metrics and exemplars where the program gives a provider of its own, which outlives a run."""

import math
import os
from typing import Any

import pytest
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.metrics import Meter, NoOpMeterProvider
from opentelemetry.sdk.metrics import MeterProvider, ObservableCounter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    InMemoryMetricReader,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import get_current_span
from support.metrics_training import STEPS, train
from support.scraped_metrics import OPENMETRICS, Series, pushed_series, scrape, value

import torchotel


class Pushes(MetricExporter):
    """Keeps the series of each push."""

    def __init__(self, temporality: AggregationTemporality) -> None:
        super().__init__({ObservableCounter: temporality})
        self.series: list[Series] = []

    def export(self, metrics_data: MetricsData, *args: Any, **kwargs: Any) -> MetricExportResult:
        self.series.append(pushed_series(encode_metrics(metrics_data)))
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 0) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 0, **kwargs: Any) -> None:
        """Do nothing."""


@pytest.mark.parametrize("temporality", [AggregationTemporality.CUMULATIVE, AggregationTemporality.DELTA])
def test_a_given_provider_serves_one_run_after_the_other(temporality: AggregationTemporality) -> None:
    """Its callbacks can't be taken back: they show what runs now, and its counters go on from the last run's."""
    pushes = Pushes(temporality)
    provider = MeterProvider([PeriodicExportingMetricReader(pushes, math.inf)], shutdown_on_exit=False)
    for steps in (5, 2):
        with torchotel.instrument(meter_provider=provider, metrics_exporter="none", traces_exporter="none") as handle:
            train(steps)
            handle.flush()
    provider.shutdown()
    for name, labels in pushes.series[-1]:
        if name.endswith("_total"):
            told = [series[name, labels] for series in pushes.series if (name, labels) in series]
            assert min(told) >= 0
            assert temporality is AggregationTemporality.DELTA or told == sorted(told)
    steps_told = [value(series, "torch_steps_total") for series in pushes.series]
    expected = [5, 0, 2, 0] if temporality is AggregationTemporality.DELTA else [5, 5, 7, 7]
    assert steps_told == expected
    assert value(pushes.series[-1], "torch_step_duration_seconds_count") == 7


def test_a_forked_child_has_no_values_of_its_parents_run() -> None:
    """The parent's reader goes on with the last values; one that goes on in a child shows no counter twice."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    with torchotel.instrument(meter_provider=provider, metrics_exporter="none", traces_exporter="none"):
        train()

    def counters() -> int:
        data = reader.get_metrics_data()
        assert data is not None
        return sum(name.endswith("_total") for name, _ in pushed_series(encode_metrics(data)))

    assert counters()
    if not (child := os.fork()):
        os._exit(counters())
    assert os.waitpid(child, 0)[1] == 0


def test_exemplars_are_those_of_a_given_tracer_provider() -> None:
    """Where spans are replayed, the ids are the provider's, and only what its sampler took is shown."""
    spans = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False, sampler=Alternating())
    provider.add_span_processor(BatchSpanProcessor(spans))
    with torchotel.instrument(tracer_provider=provider, detail="off") as handle:
        train()
        assert handle.flush()
        scraped = scrape(handle.prometheus_port, OPENMETRICS)
    provider.shutdown()
    steps = [span.context for span in spans.get_finished_spans() if span.name == "torch.step"]
    assert len(steps) == STEPS // 2
    assert scraped.exemplars
    assert scraped.exemplars <= {(f"{one.trace_id:032x}", f"{one.span_id:016x}") for one in steps if one}
    assert value(scraped.series, "torchotel_spans_total", torchotel_outcome="sampled_out")


class Alternating(Sampler):
    """Takes every other step."""

    def __init__(self) -> None:
        self._taken = False

    def should_sample(self, parent_context: Context | None, trace_id: int, name: str, *args: Any, **kwargs: Any) -> Any:
        parent = get_current_span(parent_context).get_span_context()
        if parent.is_valid:
            taken = parent.trace_flags.sampled
        else:
            self._taken ^= name == "torch.step"
            taken = self._taken
        return SamplingResult(Decision.RECORD_AND_SAMPLE if taken else Decision.DROP)

    def get_description(self) -> str:
        return "Alternating"


def test_a_provider_without_a_hash() -> None:
    """A wrapper of the program needs no more than the API's methods."""

    class Wrapper(NoOpMeterProvider):
        __hash__ = None  # type: ignore[assignment]  # Python's way to forbid a hash, which object's type excludes

        def __init__(self, inner: MeterProvider) -> None:
            self.inner = inner

        def get_meter(self, *args: Any, **kwargs: Any) -> Meter:
            return self.inner.get_meter(*args, **kwargs)

    reader = InMemoryMetricReader()
    provider = Wrapper(MeterProvider([reader], shutdown_on_exit=False))
    with torchotel.instrument(meter_provider=provider, metrics_exporter="none", traces_exporter="none") as handle:
        train()
        handle.flush()
        data = reader.get_metrics_data()
    assert data is not None
    assert value(pushed_series(encode_metrics(data)), "torch_steps_total") == STEPS
