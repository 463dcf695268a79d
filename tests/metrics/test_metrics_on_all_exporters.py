"""One set of metrics, whichever way it leaves: names, labels and values are the same on all of them."""

import time
import urllib.error
from collections.abc import Iterator

import pytest
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics._internal import metric_reader_storage
from opentelemetry.sdk.metrics.export import (
    InMemoryMetricReader,
)
from support.metrics_training import SEEN, STEPS, train
from support.otlp_http_receiver import Receiver
from support.scraped_metrics import OPENMETRICS, Series, metrics_of, pushed_exemplars, pushed_series, scrape, value

import torchotel
from torchotel._handle import Handle


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
    assert value(series, "torch_log", torch_log_name="accuracy") == 0.75
    assert value(series, "torch_log", torch_log_name="broken") is None
    calls = {
        (one["torch_module_path"], one["torch_direction"]): (one["torch_module_type"], number)
        for (name, labels), number in series.items()
        if name == "torch_module_calls_total"
        for one in [dict(labels)]
    }
    types = {"Watched": "Watched", "hidden": "Linear", "out": "Linear"}
    assert calls == {(path, way): (kind, STEPS // 2) for path, kind in types.items() for way in ("forward", "backward")}
    phases = sum(number for (name, _), number in series.items() if name == "torch_phase_time_seconds_total")
    assert phases == pytest.approx(plain["torch_step_duration_seconds_sum"])
    spans = {dict(labels)["torchotel_outcome"]: number for (name, labels), number in series.items() if "spans" in name}
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


def test_every_exemplar_has_a_trace(server: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `always_on` too: one without a trace leads nowhere, and would be on each series."""
    monkeypatch.setenv("OTEL_METRICS_EXEMPLAR_FILTER", "always_on")
    with torchotel.instrument(endpoint=server.url.removesuffix("/v1/traces"), metrics_exporter="otlp") as handle:
        train()
        assert handle.flush()
    metrics = [metric for pushed in server.pushed for metric in metrics_of(pushed.message)]
    points = [point for metric in metrics for point in (*metric.sum.data_points, *metric.histogram.data_points)]
    points += [point for metric in metrics for point in metric.gauge.data_points]
    exemplars = [exemplar for point in points for exemplar in point.exemplars]
    assert exemplars
    assert all(exemplar.trace_id for exemplar in exemplars)


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


@pytest.mark.parametrize("temporality", ["cumulative", "delta"])
def test_no_point_starts_after_its_end(server: Receiver, monkeypatch: pytest.MonkeyPatch, temporality: str) -> None:
    """Not even if the clock is set back by an hour; after that, deltas follow each other again."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", temporality)
    endpoint = server.url.removesuffix("/v1/traces")
    with torchotel.instrument(endpoint=endpoint, metrics_exporter="otlp", worker="thread") as handle:
        train(3)
        assert handle.flush()
        hour_ns = 3600 * 10**9
        monkeypatch.setattr(metric_reader_storage, "time_ns", lambda: time.time_ns() - hour_ns)
        for _ in range(2):
            train(3)
            assert handle.flush()
        monkeypatch.undo()
    before, *after = (list(intervals(pushed.message)) for pushed in server.pushed[:3])
    assert all(start <= end for _, start, end in [*before, *after[0], *after[1]])
    assert max(end for _, _, end in after[0]) < min(end for _, _, end in before)
    if temporality == "delta":
        assert {start for _, start, _ in after[1]} == {end for _, _, end in after[0]}


def intervals(message: ExportMetricsServiceRequest) -> Iterator[tuple[str, int, int]]:
    """Give the metric, start and end of each point of a sum or a histogram."""
    for metric in metrics_of(message):
        kind = metric.WhichOneof("data") or ""
        if kind != "gauge":
            points = getattr(metric, kind).data_points
            yield from ((metric.name, point.start_time_unix_nano, point.time_unix_nano) for point in points)


@pytest.mark.parametrize("histograms", ["explicit_bucket_histogram", "base2_exponential_bucket_histogram"])
@pytest.mark.parametrize("temporality", ["cumulative", "delta", "lowmemory"])
def test_points_start_before_the_measurements_that_they_cover(
    server: Receiver, monkeypatch: pytest.MonkeyPatch, temporality: str, histograms: str
) -> None:
    """Cumulative ones where the session began, delta ones where the push before ended."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", temporality)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION", histograms)
    with torchotel.instrument(
        endpoint=server.url.removesuffix("/v1/traces"),
        metrics_exporter="otlp",
        module_histograms=True,
    ) as handle:
        assert handle.flush()  # before the series of modules exist
        for _ in range(2):
            train(3)
            assert handle.flush()
    pushes = [list(intervals(pushed.message)) for pushed in server.pushed]
    ends = [max(end for _, _, end in push) for push in pushes]
    first_step_ns = min(span.start_time_unix_nano for span in server.spans if span.name == "torch.step")
    session_ns = min(start for _, start, _ in pushes[0])
    assert session_ns <= first_step_ns
    for previous_ns, push in zip([session_ns, *ends], pushes, strict=False):
        counters = {start for name, start, _ in push if not name.endswith(".duration")}
        assert counters == {previous_ns if temporality == "delta" else session_ns}
        histograms_too = {start for name, start, _ in push if name.endswith(".duration")}
        assert histograms_too <= {session_ns if temporality == "cumulative" else previous_ns}
    assert {name for name, _, _ in pushes[-2]} > {"torch.module.calls", "torch.step.duration", "torch.module.duration"}


def test_the_end_is_told(handle: Handle, server: Receiver, reader: InMemoryMetricReader) -> None:
    """The last push says that the run has finished; the port is closed, and the provider keeps the same values."""
    port = handle.prometheus_port
    handle.shutdown()
    assert value(pushed_series(server.pushed[-1].message), "torch_run_finished") == 1
    assert handle.prometheus_port is None
    with pytest.raises(urllib.error.URLError):
        scrape(port)
    for _ in range(2):
        assert in_memory(reader) == pushed_series(server.pushed[-1].message)


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
    assert value(scraped.series, "torch_log", torch_log_name="caf?") == 1
    assert value(pushed_series(server.pushed[0].message), "torch_log", torch_log_name="caf?") == 1
    attributes = {one.key: one.value for one in server.pushed[0].message.resource_metrics[0].resource.attributes}
    assert (attributes["service.name"].string_value, attributes["team"].string_value) == ("tr?s", "caf?")


def test_an_unknown_exemplar_filter_is_ignored(server: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK would raise at the variable when the provider of pushed metrics is made, and nothing would be pushed."""
    monkeypatch.setenv("OTEL_METRICS_EXEMPLAR_FILTER", "foo")
    endpoint = server.url.removesuffix("/v1/traces")
    with torchotel.instrument(endpoint=endpoint, metrics_exporter="otlp", traces_exporter="none") as handle:
        train()
        assert handle.flush()
        assert handle.stats()["internal_errors"] == 0
    assert "torch_steps_total" in {name for name, _ in pushed_series(server.pushed[-1].message)}


@pytest.mark.parametrize("variable", ["OTEL_METRIC_EXPORT_INTERVAL", "OTEL_EXPORTER_OTLP_TIMEOUT"])
def test_a_time_longer_than_any_is_a_day(server: Receiver, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """Locks and sockets raise at it; a program means "never"."""
    monkeypatch.setenv(variable, str((1 << 63) - 1))
    endpoint = server.url.removesuffix("/v1/traces")
    with torchotel.instrument(endpoint=endpoint, metrics_exporter="otlp") as handle:
        train()
        assert handle.flush()
        stats = handle.stats()
    assert stats["spans_exported"] == stats["spans_recorded"] > 0
    assert server.pushed


def pushing(server: Receiver) -> Handle:
    return torchotel.instrument(
        endpoint=server.url.removesuffix("/v1/traces"), metrics_exporter="otlp", traces_exporter="none"
    )


def pushed_values(server: Receiver, name: str) -> list[float]:
    """Give the value of a metric without labels in each push that has it."""
    series = [pushed_series(pushed.message) for pushed in server.pushed]
    return [found for one in series if (found := value(one, name)) is not None]


def test_a_push_is_given_up_after_its_timeout(server: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint that does not answer gets the next state soon, and the last one once it answers."""
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "20")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_TIMEOUT", "500")
    server.may_answer.clear()
    with pushing(server):
        server.wait_for_pushed(3, timeout_s=5)  # of OTEL_EXPORTER_OTLP_TIMEOUT there are 10 s
        train()
        server.may_answer.set()
    assert pushed_values(server, "torch_steps_total")[-1] == STEPS
    assert pushed_values(server, "torch_run_finished")[-1] == 1


@pytest.mark.parametrize(("temporality", "most"), [("cumulative", 3), ("delta", 5)])
def test_a_newer_state_replaces_one_that_waits(
    server: Receiver, monkeypatch: pytest.MonkeyPatch, temporality: str, most: int
) -> None:
    """A slow endpoint gets the last state next; of deltas it gets each."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", temporality)
    server.may_answer.clear()
    with pushing(server) as handle:
        for _ in range(4):
            train()
            assert not handle.flush(timeout_s=1)
            server.wait_for_pushed(1)
        server.may_answer.set()
    steps = pushed_values(server, "torch_steps_total")
    assert len(server.pushed) <= most
    assert (sum(steps) if temporality == "delta" else steps[-1]) == 4 * STEPS
