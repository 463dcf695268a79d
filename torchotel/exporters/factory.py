"""Create the exporters that the configuration names."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from opentelemetry.trace import TracerProvider

from torchotel._utils.distributed import own_folder
from torchotel._utils.faults import Guard
from torchotel._utils.state_dir import stack_targets
from torchotel._utils.version import package_version
from torchotel.config.config import Config
from torchotel.exporters.base import DroppingExporter, ExportStats, MetricExporter, TraceExporter
from torchotel.exporters.console import ConsoleExporter
from torchotel.exporters.otlp.sender import make_transport
from torchotel.exporters.otlp.trace_exporter import RequestExporter
from torchotel.exporters.otlp.transport import TRACES
from torchotel.exporters.run_file import RunFile
from torchotel.exporters.sanitize import SpanLimits
from torchotel.exporters.sdk.global_provider import find_provider, set_provider, user_spans
from torchotel.exporters.sdk.meter_provider import MeterProviderExporter
from torchotel.metrics.instruments import STEP_LAST_END_TIME
from torchotel.metrics.store import Metrics
from torchotel.tracing.resource import ProcessResource
from torchotel.tracing.span import Attributes

if TYPE_CHECKING:
    from torchotel.exporters.prometheus.endpoint import PrometheusMetricExporter


class MetricExporters:
    """Bring metrics out by each of their ways; a fault of one is nobody else's.

    Args:
        config: Which ways are wanted.
        metrics: What is shown and sent.
        resource: Attributes of the resource.
        version: Of torchotel, for the scope.
        stats: Where failures to push are counted.
        environ: Where the stack's folder may be told.
        wait: Open the port and push only when there is something to tell.

    Raises:
        ConfigError: The endpoint's address or the discovery folder can't be used.
    """

    def __init__(
        self,
        config: Config,
        metrics: Metrics,
        resource: Attributes,
        version: str,
        stats: ExportStats,
        environ: Mapping[str, str],
        *,
        wait: bool,
    ) -> None:
        self.guard = Guard("the ways out of metrics", limit=1000)
        self._metrics = metrics
        self._endpoint: PrometheusMetricExporter | None = None
        self._outlets: list[MetricExporter] = []
        if "prometheus" in config.metrics_exporter:
            self._serve(config, resource, environ, wait=wait)
        if config.meter_provider is not None:
            made = self.guard.guarded(MeterProviderExporter)(config.meter_provider, metrics, version)
            self._outlets += [] if made is None else [made]
        if "otlp" in config.metrics_exporter:
            pushed = self.guard.guarded(_push_metrics)(config, metrics, resource, version, stats, wait=wait)
            self._outlets += [] if pushed is None else [pushed]

    def _serve(
        self,
        config: Config,
        resource: Attributes,
        environ: Mapping[str, str],
        *,
        wait: bool,
    ) -> None:
        if config.prometheus_registry is None and config.prometheus_port is None:
            return
        from torchotel.exporters.prometheus import collector, endpoint  # noqa: PLC0415  # load prometheus_client

        if config.prometheus_registry is not None:
            self._outlets.append(
                collector.RegistryMetricExporter(config.prometheus_registry, self._metrics, resource, self.guard)
            )
        elif config.prometheus_port is not None:
            self._endpoint = endpoint.PrometheusMetricExporter(
                config.prometheus_host,
                config.prometheus_port,
                self._metrics,
                resource,
                config.discovery_dir or stack_targets(environ),
                self.guard,
                wait=wait,
            )
            self._outlets.append(self._endpoint)

    @property
    def port(self) -> int | None:
        """The port of the scrape endpoint that is really bound, or None."""
        return None if self._endpoint is None else self._endpoint.port

    def begin(self) -> None:
        """Begin what had to wait until there is something to tell; called on the worker."""
        for outlet in self._outlets:
            self.guard.guarded(outlet.first_step)()

    def flush(self, deadline_s: float) -> bool:
        """Bring out the present state; False where it could not be by `deadline_s` of `time.monotonic()`."""
        done = [self.guard.guarded(outlet.flush)(deadline_s) for outlet in self._outlets]
        return all(done)

    def shutdown(self, deadline_s: float, *, finished: bool) -> None:
        """Bring out the last state, with what became of the run, and let go of threads, ports and files."""
        if finished:
            self._metrics.finish()
        elif self._endpoint is not None and self._metrics.points(STEP_LAST_END_TIME):
            self._endpoint.leave_target()
        for outlet in self._outlets:
            self.guard.guarded(outlet.shutdown)(deadline_s)

    def disable_after_fork(self) -> None:
        """Be off in a forked child, and leave alone what is the parent's."""
        for outlet in self._outlets:
            with contextlib.suppress(Exception):  # the guard's lock may be held by a thread that is not here
                outlet.disable_after_fork()


def _push_metrics(
    config: Config, metrics: Metrics, resource: Attributes, version: str, stats: ExportStats, *, wait: bool
) -> MetricExporter:
    from torchotel.exporters.otlp.metric_exporter import (  # noqa: PLC0415  # loads the SDK's metrics
        OtlpMetricExporter,
        Pushing,
    )

    return OtlpMetricExporter(
        config.receiver("metrics"),
        Pushing.of(config),
        resource=resource,
        metrics=metrics,
        version=version,
        stats=stats,
        wait=wait,
    )


def open_record(config: Config, resource: ProcessResource, stats: ExportStats) -> RunFile | None:
    """Open the run file in this rank's folder; None if no recording is configured.

    Raises:
        ConfigError: The folder can't be used.
    """
    if config.record is None:
        return None
    return RunFile(
        own_folder(config.record, resource.identity),
        resource=resource,
        version=package_version(),
        # Where spans go both ways, those sent are the ones that are counted.
        stats=stats if config.traces_exporter == "none" else None,
    )


def make_exporters(
    config: Config, resource: Attributes, stats: ExportStats, record: RunFile | None, guard: Guard
) -> list[TraceExporter]:
    """Create the exporters of traces, the run file last.

    Args:
        config: Which exporters are wanted.
        resource: Attributes of the resource.
        stats: Where spans and failures are counted.
        record: The run file, if there is one.
        guard: Logs and counts an exporter that cannot be created; its spans are counted as dropped.
    """
    records: list[TraceExporter] = [] if record is None else [record]
    if config.traces_exporter == "none":
        return records
    provider = find_provider(config.tracer_provider)
    if config.set_global_provider:
        set_provider(config, resource)
    engine = guard.guarded(_make_engine)(config, resource, stats, provider) or DroppingExporter(stats)
    return [engine, *user_spans(stats), *records]


def _make_engine(
    config: Config, resource: Attributes, stats: ExportStats, provider: TracerProvider | None
) -> TraceExporter:
    if provider is not None:
        from torchotel.exporters.sdk.tracer_provider import TracerProviderExporter  # noqa: PLC0415  # loads the SDK's traces

        return TracerProviderExporter(provider, version=package_version(), resource=resource, stats=stats)
    if config.traces_exporter == "console":
        return ConsoleExporter(stats)
    return _make_otlp(config, resource, stats)


def _make_otlp(config: Config, resource: Attributes, stats: ExportStats) -> TraceExporter:
    version = package_version()
    transport = make_transport(config.receiver("traces"), TRACES, version=version)
    limits = SpanLimits(
        config.attribute_count_limit,
        config.event_count_limit,
        config.link_count_limit,
        config.event_attribute_count_limit,
        config.link_attribute_count_limit,
        config.attribute_value_length_limit,
        config.event_value_length_limit,
    )
    return RequestExporter(transport, resource=resource, version=version, limits=limits, stats=stats)
