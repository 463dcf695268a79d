"""The SDK's metrics as OTLP requests, handed to a sender of ours; imported on the worker, with the SDK."""

from collections.abc import Iterator
from typing import Any

from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.sdk.metrics import Counter, Histogram, ObservableCounter
from opentelemetry.sdk.metrics.export import AggregationTemporality, MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.metrics.view import Aggregation, ExponentialBucketHistogramAggregation

from torchotel.exporters.otlp.exporter import MAX_REQUEST_BYTES
from torchotel.exporters.otlp.sender import Sender

# https://opentelemetry.io/docs/specs/otel/metrics/sdk_exporters/otlp/#additional-environment-variable-configuration
_DELTAS: dict[str, tuple[type, ...]] = {
    "cumulative": (),
    "delta": (Counter, Histogram, ObservableCounter),
    "lowmemory": (Counter, Histogram),
}


class SenderMetricExporter(MetricExporter):
    """Put what a reader collects into requests of bounded size; `export` never waits for the endpoint.

    Args:
        sender: Brings them out, and counts what fails.
        temporality: Which instruments count since the last push, by OpenTelemetry's word for it.
        histograms: What histograms are, by OpenTelemetry's word for it.
    """

    def __init__(self, sender: Sender, *, temporality: str, histograms: str) -> None:
        exponential = histograms == "base2_exponential_bucket_histogram"
        aggregation: dict[type, Aggregation] = {Histogram: ExponentialBucketHistogramAggregation()}
        super().__init__(
            dict.fromkeys(_DELTAS[temporality], AggregationTemporality.DELTA), aggregation if exponential else None
        )
        self._sender = sender

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:
        """Hand the requests over; what becomes of them is the sender's to count."""
        for request in split(encode_metrics(metrics_data), MAX_REQUEST_BYTES):
            self._sender.put(request.SerializeToString(), 0)
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        """Do nothing: the sender is flushed by who owns it."""
        return True

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        """Do nothing: the sender is shut down by who owns it."""


def split(request: ExportMetricsServiceRequest, max_bytes: int) -> Iterator[ExportMetricsServiceRequest]:
    """Halve a request by its data points until each part is small enough, or one point."""
    points = sum(len(_points(metric)) for metric in _metrics(request))
    if request.ByteSize() <= max_bytes or points <= 1:
        yield request
        return
    yield from split(_part(request, 0, points // 2), max_bytes)
    yield from split(_part(request, points // 2, points), max_bytes)


def _part(request: ExportMetricsServiceRequest, start: int, stop: int) -> ExportMetricsServiceRequest:
    """Copy a request with its data points from `start` to `stop` alone."""
    part = ExportMetricsServiceRequest()
    part.CopyFrom(request)
    at = 0
    for metric in _metrics(part):
        points = _points(metric)
        n_points = len(points)
        del points[max(0, stop - at) :]
        del points[: max(0, start - at)]
        at += n_points
    for scope in (scope for resource in part.resource_metrics for scope in resource.scope_metrics):
        for index in reversed(range(len(scope.metrics))):
            if not _points(scope.metrics[index]):
                del scope.metrics[index]
    return part


def _metrics(request: ExportMetricsServiceRequest) -> Iterator[Any]:
    for resource in request.resource_metrics:
        for scope in resource.scope_metrics:
            yield from scope.metrics


def _points(metric: Any) -> Any:
    return getattr(metric, metric.WhichOneof("data")).data_points
