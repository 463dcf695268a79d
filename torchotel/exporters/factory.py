"""Create the exporters that the configuration names."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from importlib import import_module

from opentelemetry.trace import TracerProvider

from torchotel import _semconv as names
from torchotel._utils.distributed import Identity, rank_folder_name
from torchotel._utils.faults import Guard
from torchotel._utils.installation import package_version, stack_targets
from torchotel.config.config import Config
from torchotel.exporters.base import DroppingExporter, ExportStats, MetricExporter, TraceExporter
from torchotel.exporters.console import ConsoleExporter
from torchotel.exporters.otlp.sender import make_transport
from torchotel.exporters.otlp.trace_exporter import RequestExporter
from torchotel.exporters.otlp.transport import TRACES, Transport
from torchotel.exporters.prometheus import collector, endpoint
from torchotel.exporters.prometheus.server import Listener
from torchotel.exporters.run_file import RunFile
from torchotel.exporters.run_folder import ClaimedFolder, claim_folder
from torchotel.exporters.sanitize import SpanLimits
from torchotel.exporters.sdk.global_provider import find_provider, global_provider_exporters, set_provider
from torchotel.exporters.sdk.meter_provider import MeterProviderExporter
from torchotel.exporters.sdk.replay_thread import ReplayThread
from torchotel.metrics.instruments import STEP_LAST_END_TIME
from torchotel.metrics.store import Metrics
from torchotel.tracing.resource import ProcessResource
from torchotel.tracing.span import Attributes


class MetricExporters:
    """Run all metric exporters; a failure in one does not affect the others.

    Args:
        config: The configured exporters.
        metrics: Source of the metrics.
        resource: Attributes of the resource.
        version: Version of torchotel, for the scope.
        stats: Counts failed pushes.
        environ: The environment, which may name the folder of the stack.
        defer_start: Open the port and push only from the first step or evaluation.
        listener: The port of the scrape endpoint, if another process has opened it.

    Raises:
        ConfigError: The address of the scrape endpoint or the discovery folder cannot be used.
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
        defer_start: bool,
        listener: Listener | None = None,
    ) -> None:
        self.guard = Guard("the metric exporters", limit=1000)
        self._metrics = metrics
        self._endpoint: endpoint.PrometheusMetricExporter | None = None
        self._exporters: list[MetricExporter] = []
        if "prometheus" in config.metrics_exporter:
            self._serve(config, resource, environ, defer_start=defer_start, listener=listener)
        if config.meter_provider is not None:
            through = self.guard.guarded(MeterProviderExporter)(config.meter_provider, metrics, version)
            self._exporters += [] if through is None else [through]
        if "otlp" in config.metrics_exporter:
            pushed = self.guard.guarded(_make_otlp_metric_exporter)(
                config, metrics, resource, version, stats, defer_start=defer_start
            )
            self._exporters += [] if pushed is None else [pushed]

    def _serve(
        self,
        config: Config,
        resource: Attributes,
        environ: Mapping[str, str],
        *,
        defer_start: bool,
        listener: Listener | None,
    ) -> None:
        if config.prometheus_registry is None and config.prometheus_port is None:
            return
        if config.prometheus_registry is not None:
            self._exporters.append(
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
                defer_start=defer_start,
                listener=listener,
            )
            self._exporters.append(self._endpoint)

    @property
    def port(self) -> int | None:
        """Return the bound port of the scrape endpoint, or None."""
        return None if self._endpoint is None else self._endpoint.port

    def first_record(self) -> None:
        """Start the deferred exporters; called on the worker thread."""
        for exporter in self._exporters:
            self.guard.guarded(exporter.first_record)()

    def flush(self, deadline_s: float) -> bool:
        """Export the present state by `deadline_s` of `time.monotonic()`; return False on failure or timeout."""
        done = [self.guard.guarded(exporter.flush)(deadline_s) for exporter in self._exporters]
        return all(done)

    def shutdown(self, deadline_s: float, *, finished: bool) -> None:
        """Export the last state by the deadline, with `torch.run.finished`, and release threads, ports and files."""
        if finished:
            self._metrics.finish()
        else:
            self._keep_target()
        for exporter in self._exporters:
            self.guard.guarded(exporter.shutdown)(deadline_s)

    def close_endpoint(self) -> None:
        """Close the port of a training that has died: the target of Prometheus is down during the last export."""
        self._keep_target()
        if self._endpoint is not None:
            self.guard.guarded(self._endpoint.shutdown)(time.monotonic())

    def _keep_target(self) -> None:
        """Keep the target of the scrape endpoint if the run has had a step."""
        if self._endpoint is not None and self._metrics.points(STEP_LAST_END_TIME):
            self._endpoint.keep_target()

    def disable_after_fork(self) -> None:
        """Stop exporting in a forked child, without changing what belongs to the parent process."""
        for exporter in self._exporters:
            with contextlib.suppress(Exception):  # without the guard: a thread of the parent may hold its lock
                exporter.disable_after_fork()


def _make_otlp_metric_exporter(
    config: Config, metrics: Metrics, resource: Attributes, version: str, stats: ExportStats, *, defer_start: bool
) -> MetricExporter:
    from torchotel.exporters.otlp.metric_exporter import (  # noqa: PLC0415  # loads the SDK's metrics
        OtlpMetricExporter,
        PushSettings,
    )

    return OtlpMetricExporter(
        config.otlp_endpoint("metrics"),
        PushSettings.of(config),
        resource=resource,
        metrics=metrics,
        version=version,
        stats=stats,
        defer_start=defer_start,
    )


def load_endpoint(config: Config) -> None:
    """Import what `claim_endpoint` needs, so that a later call does not take the time of imports."""
    if "prometheus" in config.metrics_exporter and config.prometheus_port is not None:
        import_module("torchotel.exporters.prometheus.endpoint")


def claim_run_folder(config: Config, identity: Identity) -> ClaimedFolder | None:
    """Claim this rank's folder of the run file; None if no recording is configured.

    Raises:
        ConfigError: The folder cannot be used.
    """
    if config.record is None:
        return None
    return claim_folder(config.record, rank_folder_name(identity), identity.generation)


def claim_endpoint(
    config: Config, resource: ProcessResource, environ: Mapping[str, str]
) -> tuple[Listener, endpoint.DiscoveryFile | None] | None:
    """Open the port of the scrape endpoint, and prepare its target file; None without a scrape endpoint.

    Raises:
        ConfigError: The address or the folder cannot be used.
    """
    if "prometheus" not in config.metrics_exporter or config.prometheus_port is None:
        return None
    target = endpoint.open_discovery(config.discovery_dir or stack_targets(environ), resource)
    return endpoint.listen(config.prometheus_host, config.prometheus_port, resource.get(names.LOCAL_RANK)), target


def open_record(
    config: Config, resource: ProcessResource, stats: ExportStats, claimed: ClaimedFolder | None = None
) -> RunFile | None:
    """Open the run file in this rank's folder; None if no recording is configured.

    Args:
        config: The configured folder.
        resource: Attributes of the resource.
        stats: Counts spans and failures.
        claimed: The folder, if another process has claimed it; None: it is claimed.

    Raises:
        ConfigError: The folder cannot be used.
    """
    claimed = claimed or claim_run_folder(config, resource.identity)
    if claimed is None:
        return None
    return RunFile(
        claimed,
        resource=resource,
        version=package_version(),
        # If spans are exported as well, only exported spans are counted.
        stats=stats if config.traces_exporter == "none" else None,
    )


def make_exporters(
    config: Config, resource: Attributes, stats: ExportStats, record: RunFile | None, guard: Guard
) -> list[TraceExporter]:
    """Create the exporters of traces, the run file last.

    Args:
        config: The configured exporters.
        resource: Attributes of the resource.
        stats: Counts spans and failures.
        record: The run file, or None.
        guard: Logs and counts an exporter that cannot be created; its spans are counted as dropped.
    """
    records: list[TraceExporter] = [] if record is None else [record]
    if config.traces_exporter == "none":
        return records
    provider = find_provider(config.tracer_provider)
    if config.set_global_provider:
        set_provider(config, resource)
    make = guard.guarded(_make_trace_exporter)
    exporter = make(config, resource, stats, provider, guard) or DroppingExporter(stats)
    return [exporter, *global_provider_exporters(stats), *records]


def _make_trace_exporter(
    config: Config, resource: Attributes, stats: ExportStats, provider: TracerProvider | None, guard: Guard
) -> TraceExporter:
    if provider is not None:
        from torchotel.exporters.sdk.tracer_provider import TracerProviderExporter  # noqa: PLC0415  # loads the SDK's traces

        exporter = TracerProviderExporter(provider, version=package_version(), resource=resource, stats=stats)
        return ReplayThread(exporter, guard)
    if config.traces_exporter == "console":
        return ConsoleExporter(stats)
    return _make_otlp(config, resource, stats)


def make_trace_transport(config: Config) -> Transport | None:
    """Create a connection to the OTLP endpoint of traces; None if traces go elsewhere."""
    if config.traces_exporter != "otlp" or find_provider(config.tracer_provider) is not None:
        return None
    return make_transport(config.otlp_endpoint("traces"), TRACES, version=package_version())


def _make_otlp(config: Config, resource: Attributes, stats: ExportStats) -> TraceExporter:
    version = package_version()
    transport = make_transport(config.otlp_endpoint("traces"), TRACES, version=version)
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
