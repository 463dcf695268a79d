"""Convert metrics of the SDK to OTLP requests for the sender."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_DELTA
from opentelemetry.sdk.metrics import Counter, Histogram, ObservableCounter
from opentelemetry.sdk.metrics.export import AggregationTemporality, MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.metrics.view import Aggregation, ExponentialBucketHistogramAggregation
from opentelemetry.sdk.resources import Resource

from torchotel import _semconv as names
from torchotel._limits import MAX_REQUEST_BYTES
from torchotel.exporters.otlp.sender import Sender
from torchotel.exporters.sanitize import otlp_safe
from torchotel.tracing.span import Attributes

# https://opentelemetry.io/docs/specs/otel/metrics/sdk_exporters/otlp/#additional-environment-variable-configuration
_DELTAS: dict[str, tuple[type, ...]] = {
    "cumulative": (),
    "delta": (Counter, Histogram, ObservableCounter),
    "lowmemory": (Counter, Histogram),
}


class SenderMetricExporter(MetricExporter):
    """Pass the metrics of a reader to the sender in requests of bounded size, without waiting for the endpoint.

    A push of cumulative values replaces earlier pushes that still wait. Pushes of deltas are all sent.

    Args:
        sender: Sends the requests and counts failures.
        resource: Attributes of the resource, read for each push; replaces the provider's resource.
        start_ns: Unix time at which all counters were 0.
        temporality: Value of OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE.
        histograms: Value of OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION.
    """

    def __init__(
        self, sender: Sender, resource: Attributes, *, start_ns: int, temporality: str, histograms: str
    ) -> None:
        exponential = histograms == "base2_exponential_bucket_histogram"
        aggregation: dict[type, Aggregation] = {Histogram: ExponentialBucketHistogramAggregation()}
        self._deltas = _DELTAS[temporality]
        super().__init__(
            dict.fromkeys(self._deltas, AggregationTemporality.DELTA), aggregation if exponential else None
        )
        self._sender, self._resource = sender, resource
        self._start_ns = self._last_push_ns = start_ns

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:
        """Pass the requests to the sender, which counts failures."""
        resource = Resource(otlp_safe(self._resource), names.SCHEMA_URL)
        ours = [
            replace(one, resource=resource, schema_url=resource.schema_url) for one in metrics_data.resource_metrics
        ]
        whole = encode_metrics(MetricsData(ours))
        self._set_start_times(whole)
        if not self._deltas:
            self._sender.discard_waiting()  # otherwise a slow endpoint receives ever older values
        for request in split(whole, MAX_REQUEST_BYTES):
            self._sender.put(request.SerializeToString(), 0)
        return MetricExportResult.SUCCESS

    def _set_start_times(self, request: ExportMetricsServiceRequest) -> None:
        """Set the start times of sums and histograms: the session's start, or the last push for deltas.

        The SDK's start time is the first observation, which is after the measurements that a callback returns.
        """
        collected_ns = self._last_push_ns
        for metric in _metrics(request):
            data = getattr(metric, metric.WhichOneof("data"))
            is_gauge = metric.HasField("gauge")
            is_delta = not is_gauge and data.aggregation_temporality == AGGREGATION_TEMPORALITY_DELTA
            for point in data.data_points:
                collected_ns = max(collected_ns, point.time_unix_nano)
                if not is_gauge:
                    point.start_time_unix_nano = self._last_push_ns if is_delta else self._start_ns
        self._last_push_ns = collected_ns

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        """Do nothing: the owner of the sender flushes it."""
        return True

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        """Do nothing: the owner of the sender shuts it down."""


def split(request: ExportMetricsServiceRequest, max_bytes: int) -> Iterator[ExportMetricsServiceRequest]:
    """Halve a request by data points until each part is small enough or has one data point."""
    points = sum(len(_points(metric)) for metric in _metrics(request))
    if request.ByteSize() <= max_bytes or points <= 1:
        yield request
        return
    yield from split(_part(request, 0, points // 2), max_bytes)
    yield from split(_part(request, points // 2, points), max_bytes)


def _part(request: ExportMetricsServiceRequest, start: int, stop: int) -> ExportMetricsServiceRequest:
    """Copy a request with only the data points from `start` to `stop`."""
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
