"""One set of metrics, whichever way it leaves: names, labels and values are the same on all of them."""

import math
import socket
import time
import urllib.error
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import python
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
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
from receiver import Receiver
from scrapes import OPENMETRICS, Series, pushed_exemplars, pushed_series, scrape, value
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchotel
from torchotel._handle import Handle

STEPS = 12
SEEN = {
    "torch_step_duration_seconds_bucket": {"le"},
    "torch_step_duration_seconds_sum": set(),
    "torch_step_duration_seconds_count": set(),
    "torch_phase_time_seconds_total": {"phase"},
    "torch_module_time_seconds_total": {"model", "module", "type", "direction"},
    "torch_module_calls_total": {"model", "module", "type", "direction"},
    "torch_module_duration_seconds_bucket": {"model", "module", "type", "direction", "le"},
    "torch_module_duration_seconds_sum": {"model", "module", "type", "direction"},
    "torch_module_duration_seconds_count": {"model", "module", "type", "direction"},
    "torch_module_gradient_norm": {"model", "module"},
    "torch_gradient_norm": set(),
    "torch_tensor_gradient_norm": {"tensor"},
    "torch_gradient_nonfinite_total": set(),
    "torch_loss_nonfinite_total": set(),
    "torch_steps_total": set(),
    "torch_samples_total": set(),
    "torch_evaluations_total": set(),
    "torch_loss": set(),
    "torch_learning_rate": set(),
    "torch_step_last_end_time_seconds": set(),
    "torch_run_finished": set(),
    "torch_tokens_total": set(),
    "torch_log": {"name"},
    "torch_evaluation_time_seconds_total": set(),
    "torchotel_spans_total": {"outcome"},
    "torchotel_overhead_ratio": set(),
    "torchotel_detail_ratio": set(),
}
"""All rows of the conventions but those that need a GPU or a failing endpoint."""


class Watched(nn.Module):
    """A model whose hidden activations are watched."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(x)
        torchotel.watch(hidden, "hidden")
        out: torch.Tensor = self.out(hidden.relu())
        return out


def train(steps: int = STEPS) -> None:
    """Train, log, and evaluate two batches."""
    model = Watched()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    data = TensorDataset(torch.rand(4 * steps, 4))
    for (batch,) in DataLoader(data, batch_size=4):
        loss = model(batch).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torchotel.log(loss=loss, samples=len(batch), tokens=10, accuracy=0.75, broken=math.nan)
    model.eval()
    with torch.no_grad():
        for _ in range(2):
            model(torch.rand(4, 4))


@pytest.fixture
def reader() -> InMemoryMetricReader:
    return InMemoryMetricReader()


@pytest.fixture
def handle(server: Receiver, reader: InMemoryMetricReader) -> Handle:
    """Run a training that all ways out have seen, and that has not ended."""
    handle = torchotel.instrument(
        endpoint=server.url.removesuffix("/v1/traces"),
        metrics_exporter="prometheus,otlp",
        meter_provider=MeterProvider([reader], shutdown_on_exit=False),
        module_histograms=True,
        gradient_norms=True,
        detail=2,
    )
    train()
    assert handle.flush()
    return handle


def in_memory(reader: InMemoryMetricReader) -> Series:
    data = reader.get_metrics_data()
    assert data is not None
    return pushed_series(encode_metrics(data))


def test_all_ways_out_agree(handle: Handle, server: Receiver, reader: InMemoryMetricReader) -> None:
    """Text, OpenMetrics, OTLP and a given provider have the same series with the same values."""
    text, openmetrics = scrape(handle.prometheus_port), scrape(handle.prometheus_port, OPENMETRICS)
    assert text.content_type.startswith("text/plain")
    assert openmetrics.content_type.startswith("application/openmetrics-text")
    names: dict[str, set[str]] = {}
    for name, labels in text.series:
        names.setdefault(name, set()).update(label for label, _ in labels)
    assert names == SEEN
    assert openmetrics.series == text.series
    assert pushed_series(server.pushed[-1].message) == text.series
    assert in_memory(reader) == text.series


def test_values_are_those_of_the_run(handle: Handle) -> None:
    """Steps, samples, calls and phases are what the program did."""
    series = scrape(handle.prometheus_port).series
    plain = {name: number for (name, labels), number in series.items() if not labels}
    assert plain["torch_steps_total"] == plain["torch_step_duration_seconds_count"] == STEPS
    assert (plain["torch_samples_total"], plain["torch_tokens_total"]) == (4 * STEPS, 10 * STEPS)
    assert (plain["torch_evaluations_total"], plain["torch_learning_rate"]) == (2, 0.125)
    assert (plain["torch_run_finished"], plain["torchotel_detail_ratio"]) == (0, 0.5)
    assert value(series, "torch_log", name="accuracy") == 0.75
    assert value(series, "torch_log", name="broken") is None
    calls = {
        (one["module"], one["direction"]): (one["type"], number)
        for (name, labels), number in series.items()
        if name == "torch_module_calls_total"
        for one in [dict(labels)]
    }
    types = {"Watched": "Watched", "hidden": "Linear", "out": "Linear"}
    assert calls == {(path, way): (kind, STEPS // 2) for path, kind in types.items() for way in ("forward", "backward")}
    phases = sum(number for (name, _), number in series.items() if name == "torch_phase_time_seconds_total")
    assert phases == pytest.approx(plain["torch_step_duration_seconds_sum"])
    spans = {dict(labels)["outcome"]: number for (name, labels), number in series.items() if "spans" in name}
    assert spans == {
        "exported": handle.stats()["spans_exported"],
        "dropped_queue": 0,
        "dropped_export": 0,
        "sampled_out": 0,
    }


def test_exemplars_lead_to_traces_that_arrived(handle: Handle, server: Receiver) -> None:
    """Their ids are those of steps' roots which the receiver has."""
    steps = {(one.trace_id.hex(), one.span_id.hex()) for one in server.spans if one.name == "torch.step"}
    scraped = scrape(handle.prometheus_port, OPENMETRICS).exemplars
    for found in (scraped, pushed_exemplars(server.pushed[-1].message)):
        assert found
        assert found <= steps


def test_target_info_is_the_resource(handle: Handle, server: Receiver) -> None:
    """What a scrape says of the process is what OTLP says of it."""
    (resource,) = {
        one.resource.SerializeToString(): one.resource for one in server.pushed[-1].message.resource_metrics
    }.values()
    pushed = {one.key.replace(".", "_"): one.value for one in resource.attributes}
    target = scrape(handle.prometheus_port).target
    assert set(target) == set(pushed)
    assert target["torch_rank"] == str(pushed["torch_rank"].int_value) == "0"
    assert target["torch_run_id"] == pushed["torch_run_id"].string_value


def test_the_end_is_told_and_then_all_is_silent(handle: Handle, server: Receiver, reader: InMemoryMetricReader) -> None:
    """The last push says that the run has finished; after it the port is closed, and the provider gets nothing."""
    port = handle.prometheus_port
    handle.shutdown()
    assert value(pushed_series(server.pushed[-1].message), "torch_run_finished") == 1
    assert handle.prometheus_port is None
    with pytest.raises(urllib.error.URLError):
        scrape(port)
    assert {name.rpartition("_")[0] for name, _ in in_memory(reader)} == {
        "torch_step_duration_seconds",
        "torch_module_duration_seconds",
    }, "the SDK keeps what histograms have got"


def test_an_error_is_no_normal_end(server: Receiver) -> None:
    """A block that raises leaves `torch.run.finished` at 0."""
    endpoint = server.url.removesuffix("/v1/traces")
    with (
        pytest.raises(RuntimeError, match="mine"),
        torchotel.instrument(endpoint=endpoint, metrics_exporter="otlp", traces_exporter="none"),
    ):
        raise RuntimeError("mine")
    assert value(pushed_series(server.pushed[-1].message), "torch_run_finished") == 0


ENDINGS = [("pass", 1), ("1 / 0", 0), ("with handle: sys.exit()", 1), ("with handle: sys.exit(3)", 0)]


@pytest.mark.parametrize(("last_line", "finished"), ENDINGS)
def test_a_program_that_raises_has_not_finished(
    last_line: str, finished: int, server: Receiver, tmp_path: Path
) -> None:
    """Nobody shuts down: the end of the program does, and knows how it came."""
    endpoint = server.url.removesuffix("/v1/traces")
    script = f"import sys, torchotel; handle = torchotel.instrument(endpoint={endpoint!r})\n{last_line}"
    python("-c", script, cwd=tmp_path, OTEL_METRICS_EXPORTER="otlp", OTEL_TRACES_EXPORTER="none")
    assert value(pushed_series(server.pushed[-1].message), "torch_run_finished") == finished


@pytest.mark.parametrize(("last_line", "finished"), [*ENDINGS, ("sys.exit(0)", 1), ("sys.exit(3)", 0)])
def test_a_rank_that_raises_has_not_finished(last_line: str, finished: int, server: Receiver, tmp_path: Path) -> None:
    """A child of multiprocessing ends without atexit, and its exit code is known."""
    script = CHILD.format(endpoint=server.url.removesuffix("/v1/traces"), last_line=last_line)
    python("-c", script, cwd=tmp_path, OTEL_METRICS_EXPORTER="otlp", OTEL_TRACES_EXPORTER="none")
    assert value(pushed_series(server.pushed[-1].message), "torch_run_finished") == finished


CHILD = """
import multiprocessing, sys, torch, torchotel

def rank():
    handle = torchotel.instrument(endpoint={endpoint!r})
    model = torch.nn.Linear(1, 1)
    model(torch.ones(1, 1)).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    {last_line}

child = multiprocessing.get_context("fork").Process(target=rank)
child.start()
child.join()
"""


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


def test_headers_and_compression_are_those_of_metrics(server: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is for traces alone does not reach the endpoint of metrics."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_HEADERS", "for-metrics=1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "for-traces=1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_COMPRESSION", "none")
    torchotel.instrument(endpoint=server.url.removesuffix("/v1/traces"), metrics_exporter="otlp").shutdown()
    headers = {name.lower(): text for name, text in server.pushed[-1].headers.items()}
    assert headers["for-metrics"] == "1"
    assert "for-traces" not in headers
    assert "content-encoding" not in headers


def test_what_utf8_cannot_say_stops_no_way_out(server: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lone surrogate, as Python makes of a byte in an argument or a variable, becomes a question mark."""
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=caf\udce9")
    with torchotel.instrument(
        endpoint=server.url.removesuffix("/v1/traces"),
        metrics_exporter="prometheus,otlp",
        traces_exporter="none",
        service_name="tr\udce9s",
    ) as handle:
        torchotel.log(**{"caf\udce9": 1.0})
        assert handle.flush()
        scraped = scrape(handle.prometheus_port)
    assert (scraped.target["service_name"], scraped.target["team"]) == ("tr?s", "caf?")
    assert value(scraped.series, "torch_log", name="caf?") == 1
    assert value(pushed_series(server.pushed[0].message), "torch_log", name="caf?") == 1
    attributes = {one.key: one.value for one in server.pushed[0].message.resource_metrics[0].resource.attributes}
    assert (attributes["service.name"].string_value, attributes["team"].string_value) == ("tr?s", "caf?")


def test_a_dead_endpoint_keeps_nobody_waiting() -> None:
    """`flush` says that nothing came out in time, and the end comes in its time, with no thread left."""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes a connection, and says nothing
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        handle = torchotel.instrument(endpoint=endpoint, metrics_exporter="otlp", traces_exporter="none")
        began_s = time.monotonic()
        assert not handle.flush(timeout_s=0.5)
        handle.shutdown(timeout_s=0.5)
        assert time.monotonic() - began_s < 5


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_an_endpoint_that_refuses_is_counted_and_told_once(protocol: str, caplog: pytest.LogCaptureFixture) -> None:
    """The warning names it once, the failures are counted, and the end waits for nobody."""
    with socket.create_server(("127.0.0.1", 0)) as refusing:
        port = refusing.getsockname()[1]
    settings: Any = {"endpoint": f"http://127.0.0.1:{port}", "protocol": protocol}
    handle = torchotel.instrument(metrics_exporter="prometheus,otlp", traces_exporter="none", **settings)
    for _ in range(3):
        assert not handle.flush(timeout_s=0.3)
    errors = handle.stats()["export_errors"]
    assert errors >= 1
    told = scrape(handle.prometheus_port).series
    (series,) = [labels for name, labels in told if name == "torchotel_export_errors_total"]
    assert dict(series)["error_type"] in {"ConnectionError", "UNAVAILABLE"}
    began_s = time.monotonic()
    handle.shutdown(timeout_s=10)
    assert time.monotonic() - began_s < 5
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"Could not send data points to {'http://' if protocol != 'grpc' else ''}127.0.0.1:{port}" in warning
    assert "OTEL_METRICS_EXPORTER=none" in warning


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
    assert value(scraped.series, "torchotel_spans_total", outcome="sampled_out")


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
