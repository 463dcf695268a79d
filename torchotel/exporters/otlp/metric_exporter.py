"""Push metrics to an OTLP endpoint with a separate MeterProvider."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_DELTA
from opentelemetry.sdk import metrics as sdk
from opentelemetry.sdk.metrics import Counter, Histogram, ObservableCounter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    MetricExportResult,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.metrics.export import (
    MetricExporter as SdkMetricExporter,
)
from opentelemetry.sdk.metrics.view import Aggregation, ExponentialBucketHistogramAggregation, View
from opentelemetry.sdk.resources import Resource

from torchotel import _semconv as names
from torchotel._limits import MAX_METRIC_MODULES, MAX_REQUEST_BYTES
from torchotel._utils.faults import Warn
from torchotel.config.config import Config
from torchotel.config.otlp_endpoint import OtlpEndpoint
from torchotel.exporters.base import ExportStats, MetricExporter
from torchotel.exporters.otlp.sender import RetryPolicy, Sender, make_transport
from torchotel.exporters.otlp.transport import METRICS
from torchotel.exporters.sanitize import otlp_safe
from torchotel.exporters.sdk.meter_provider import ProviderInstruments
from torchotel.metrics.store import Metrics
from torchotel.tracing.span import Attributes

# https://opentelemetry.io/docs/specs/otel/metrics/sdk_exporters/otlp/#additional-environment-variable-configuration
_DELTAS: dict[str, tuple[type, ...]] = {
    "cumulative": (),
    "delta": (Counter, Histogram, ObservableCounter),
    "lowmemory": (Counter, Histogram),
}


class SenderMetricExporter(SdkMetricExporter):
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

        The SDK's start time is the first observation, which is after the measurements that a callback returns. If the
        clock was set back, an interval is empty instead of negative.
        """
        collected_ns = 0
        for metric in _metrics(request):
            data = getattr(metric, metric.WhichOneof("data"))
            is_gauge = metric.HasField("gauge")
            is_delta = not is_gauge and data.aggregation_temporality == AGGREGATION_TEMPORALITY_DELTA
            for point in data.data_points:
                collected_ns = max(collected_ns, point.time_unix_nano)
                if not is_gauge:
                    start_ns = self._last_push_ns if is_delta else self._start_ns
                    point.start_time_unix_nano = min(start_ns, point.time_unix_nano)
        self._last_push_ns = collected_ns or self._last_push_ns

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


THREAD_NAME = "torchotel-metrics"


class PushSettings(NamedTuple):
    """Settings of pushed metrics."""

    interval_s: float
    export_timeout_s: float
    """Timeout of a push and of each attempt."""
    temporality: str
    histograms: str
    exemplars: str
    """Value of OTEL_METRICS_EXEMPLAR_FILTER."""

    @classmethod
    def of(cls, config: Config) -> PushSettings:
        """Read the settings from the configuration."""
        return cls(
            config.metrics_interval_s,
            config.metrics_export_timeout_s,
            config.metrics_temporality,
            config.metrics_histograms,
            config.exemplar_filter,
        )


class OtlpMetricExporter(MetricExporter):
    """Push metrics at an interval and at shutdown: the SDK collects them, the sender sends them.

    The SDK's exporters cannot be interrupted, report failures only to their log, and retry for their whole timeout.

    Args:
        otlp_endpoint: Endpoint and its settings.
        settings: Settings of the pushes.
        resource: Attributes of the resource.
        metrics: Source of the metrics.
        version: Version of torchotel, for the scope.
        stats: Counts failures.
        defer_start: Start with the first step or evaluation: this process may be a DataLoader's worker.
    """

    def __init__(
        self,
        otlp_endpoint: OtlpEndpoint,
        settings: PushSettings,
        *,
        resource: Attributes,
        metrics: Metrics,
        version: str,
        stats: ExportStats,
        defer_start: bool,
    ) -> None:
        self._settings, self._resource, self._metrics, self._version = settings, resource, metrics, version
        attempt_s = min(otlp_endpoint.timeout_s, settings.export_timeout_s)
        self._transport = make_transport(otlp_endpoint._replace(timeout_s=attempt_s), METRICS, version=version)
        self._sender = Sender(
            self._transport, stats, signal=METRICS, retry=RetryPolicy(max_elapsed_s=settings.export_timeout_s)
        )
        self._ended = False
        self._instruments: ProviderInstruments | None = None
        self._pusher: _Pusher | None = None
        self._close: Callable[[], None] | None = None
        if not defer_start:
            self._start()

    def first_record(self) -> None:
        """Start if this was deferred."""
        if self._pusher is None and not self._ended:
            self._start()

    def flush(self, deadline_s: float) -> bool:
        """Push the present state by the deadline; return False on timeout."""
        return self._pusher is None or (self._pusher.push(deadline_s) and self._sender.flush(deadline_s))

    def shutdown(self, deadline_s: float) -> None:
        """Push the last state by the deadline and shut the provider down."""
        self._ended = True
        pusher, self._pusher = self._pusher, None
        if pusher is not None:
            pusher.end(deadline_s)
        self._sender.shutdown(deadline_s)
        if self._close is not None:
            self._close()
        if self._instruments is not None:
            self._instruments.close()

    def disable_after_fork(self) -> None:
        """Drop the reference to the thread, which does not run in the child."""
        self._ended = True
        self._pusher = None
        if self._instruments is not None:
            self._instruments.disable_after_fork()

    def _start(self) -> None:
        # By default the SDK sums the series of an instrument beyond 2,000 without their attributes.
        limit: dict[str, Any] = {"aggregation_cardinality_limit": 2 * MAX_METRIC_MODULES}
        try:
            views = [View(instrument_name="torch.module.*", **limit)]
        except TypeError:  # SDK before 1.45.2: no limit
            views = []
        settings = self._settings
        exporter = SenderMetricExporter(
            self._sender,
            self._resource,
            start_ns=self._metrics.start_ns,
            temporality=settings.temporality,
            histograms=settings.histograms,
        )
        # Without the SDK's thread, which restarts in every forked child.
        reader = PeriodicExportingMetricReader(exporter, export_interval_millis=math.inf)
        # Without an argument the SDK reads the variable and raises on an unknown value. Exemplars link to traces, so
        # `always_on` adds none without a trace.
        off = settings.exemplars == "always_off"
        exemplars = sdk.AlwaysOffExemplarFilter() if off else sdk.TraceBasedExemplarFilter()
        provider = sdk.MeterProvider(
            [reader], Resource.get_empty(), exemplar_filter=exemplars, shutdown_on_exit=False, views=views
        )
        self._close = provider.shutdown
        self._instruments = ProviderInstruments(provider, self._metrics, self._version)
        self._pusher = _Pusher(reader.collect, settings.interval_s)


class _Pusher:
    """A thread that pushes at an interval, on request, and at its end."""

    def __init__(self, push: Callable[[], None], interval_s: float) -> None:
        self._push, self._interval_s = push, interval_s
        self._warn = Warn()
        self._changed = threading.Condition()
        self._asked = self._done = 0
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be started: only `end` pushes
            self._thread.start()

    def push(self, deadline_s: float) -> bool:
        """Push now; return False on timeout, and without a thread."""
        if not self._thread.is_alive():
            return False
        with self._changed:
            self._asked += 1
            asked = self._asked
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._done >= asked, max(0.0, deadline_s - time.monotonic()))

    def end(self, deadline_s: float) -> None:
        """Push a last time; an attempt that runs at the deadline ends later."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if self._thread.ident is None:
            self._run()  # pushes once
        else:
            self._thread.join(max(0.0, deadline_s - time.monotonic()))

    def _run(self) -> None:
        ended = False
        while not ended:
            with self._changed:
                self._changed.wait_for(lambda: self._asked > self._done or self._ended, self._interval_s)
                asked, ended = self._asked, self._ended
            try:
                self._push()
            except Exception as error:  # noqa: BLE001  # the next push may succeed
                self._warn("Could not push metrics; further failures are not logged", error=error)
            with self._changed:
                self._done = asked
                self._changed.notify_all()
