"""Metrics as the other side reads them, in one form whichever way they came: series by name and labels."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias
from urllib.request import Request, urlopen

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

Series: TypeAlias = dict[tuple[str, frozenset[tuple[str, str]]], float]
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
UNITS = {"s": "_seconds", "By": "_bytes", "1": "_ratio"}  # of the conversion of OTLP into Prometheus


class Scrape(NamedTuple):
    """One answer of a scrape endpoint."""

    content_type: str
    text: str
    families: list[Any]

    @property
    def series(self) -> Series:
        """Give its series, target_info left out."""
        samples = [sample for family in self.families for sample in family.samples]
        found = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for sample in samples
            if sample.name != "target_info"
        }
        names = [(sample.name, frozenset(sample.labels.items())) for sample in samples]
        assert len(set(names)) == len(names), "a series came twice"
        return found

    @property
    def target(self) -> dict[str, str]:
        """Give the labels of target_info."""
        (sample,) = [one for family in self.families for one in family.samples if one.name == "target_info"]
        return dict(sample.labels)

    @property
    def exemplars(self) -> set[tuple[str, str]]:
        """Give the ids of its exemplars."""
        samples = [sample for family in self.families for sample in family.samples if sample.exemplar]
        return {(one.exemplar.labels["trace_id"], one.exemplar.labels["span_id"]) for one in samples}


def scrape(port: int | None, accept: str = "text/plain") -> Scrape:
    """Scrape a port of this machine, and parse the answer with Prometheus's own parsers."""
    with urlopen(Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept}), timeout=10) as answer:
        content_type, text = answer.headers["Content-Type"], answer.read().decode()
    parse = parse_openmetrics if content_type.startswith("application/openmetrics-text") else parse_text
    return Scrape(content_type, text, list(parse(text)))


def value(series: Series, name: str, /, **labels: str) -> float | None:
    """Give one series' value; None where it isn't there."""
    return series.get((name, frozenset(labels.items())))


def metrics_of(message: ExportMetricsServiceRequest) -> Iterator[Metric]:
    """Give the metrics of all resources and scopes."""
    for resource in message.resource_metrics:
        for scope in resource.scope_metrics:
            yield from scope.metrics


def pushed_series(message: ExportMetricsServiceRequest) -> Series:
    """Give the series of a push, under the names that Prometheus's OTLP receiver makes of them."""
    return dict(series for metric in metrics_of(message) for series in _series(metric))


def pushed_exemplars(message: ExportMetricsServiceRequest) -> set[tuple[str, str]]:
    """Give the ids of the exemplars of a push."""
    points = [point for metric in metrics_of(message) for point in metric.histogram.data_points]
    return {(one.trace_id.hex(), one.span_id.hex()) for point in points for one in point.exemplars}


def _series(metric: Metric) -> Iterator[tuple[tuple[str, frozenset[tuple[str, str]]], float]]:
    name, unit = metric.name.replace(".", "_"), UNITS.get(metric.unit, "")
    name += "" if name.endswith(unit) else unit
    if metric.WhichOneof("data") == "histogram":
        for point in metric.histogram.data_points:
            labels = _labels(point.attributes)
            bounds = [*map(float, point.explicit_bounds), float("inf")]
            for index, bound in enumerate(bounds):
                le = ("le", "+Inf" if bound == float("inf") else repr(bound))
                yield (f"{name}_bucket", frozenset({*labels, le})), sum(point.bucket_counts[: index + 1])
            yield (f"{name}_sum", labels), point.sum
            yield (f"{name}_count", labels), point.count
        return
    data = getattr(metric, metric.WhichOneof("data") or "")
    name += "_total" if metric.HasField("sum") and metric.sum.is_monotonic else ""
    for point in data.data_points:
        yield (name, _labels(point.attributes)), getattr(point, point.WhichOneof("value"))


def _labels(attributes: Iterable[Any]) -> frozenset[tuple[str, str]]:
    return frozenset((one.key.replace(".", "_"), one.value.string_value) for one in attributes)
