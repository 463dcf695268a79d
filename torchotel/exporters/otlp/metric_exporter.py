"""Push metrics to an OTLP endpoint with a separate MeterProvider."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from opentelemetry.sdk import metrics as sdk
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.metrics.view import View
from opentelemetry.sdk.resources import Resource

from torchotel._limits import MAX_METRIC_MODULES
from torchotel._utils.faults import Warn
from torchotel.config.config import Config
from torchotel.config.otlp_endpoint import OtlpEndpoint
from torchotel.exporters.base import ExportStats, MetricExporter
from torchotel.exporters.otlp.metric_requests import SenderMetricExporter
from torchotel.exporters.otlp.sender import RetryPolicy, Sender, make_transport
from torchotel.exporters.otlp.transport import METRICS
from torchotel.exporters.sdk.meter_provider import ProviderInstruments
from torchotel.metrics.store import Metrics
from torchotel.tracing.span import Attributes

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
        defer_start: Start with the first step: this process may be a DataLoader's worker.
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

    def first_step(self) -> None:
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
        self._thread.start()

    def push(self, deadline_s: float) -> bool:
        """Push now; return False on timeout."""
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
