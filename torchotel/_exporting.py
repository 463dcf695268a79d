"""Where traces go: the exporters that the configuration asks for."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from opentelemetry.trace import TracerProvider

from torchotel._utils.distributed import own_folder
from torchotel._utils.version import package_version
from torchotel.config.config import Config
from torchotel.exporters.late import LateExporter
from torchotel.exporters.sdk.global_provider import find_provider, set_provider, user_spans
from torchotel.exporters.stats import ExportStats
from torchotel.tracing.resource import ProcessResource
from torchotel.tracing.span import Attributes, TraceExporter

if TYPE_CHECKING:
    from torchotel.exporters.runfile import RunFile

REST_S = 0.0002  # the longest gap that the worker makes in the training thread is one slice of spans


def open_record(config: Config, resource: ProcessResource, stats: ExportStats) -> RunFile | None:
    """Open the run file in this rank's folder; None if no recording is configured.

    Raises:
        ConfigError: The folder can't be used.
    """
    if config.record is None:
        return None
    from torchotel.exporters.runfile import RunFile  # noqa: PLC0415  # what is used is loaded

    return RunFile(
        own_folder(config.record, resource.identity),
        resource=resource,
        version=package_version(),
        # Where spans go both ways, those sent are the ones that are counted.
        stats=stats if config.traces_exporter == "none" else None,
        rest=rest,
    )


def make_exporters(
    config: Config, resource: Attributes, stats: ExportStats, record: RunFile | None
) -> list[TraceExporter]:
    """Return the engine for the provider that there is or for none, and the run file last."""
    records: list[TraceExporter] = [] if record is None else [record]
    if config.traces_exporter == "none":
        return records
    provider = find_provider(config.tracer_provider)
    if config.set_global_provider:
        set_provider(config, resource)
    return [_make_engine(config, resource, stats, provider), *user_spans(stats), *records]


def _make_engine(
    config: Config, resource: Attributes, stats: ExportStats, provider: TracerProvider | None
) -> TraceExporter:
    if provider is not None:
        from torchotel.exporters.sdk.tracer_provider import SdkEngine  # noqa: PLC0415  # as above

        return SdkEngine(provider, version=package_version(), resource=resource, stats=stats, rest=rest)
    if config.traces_exporter == "console":
        from torchotel.exporters.console import ConsoleExporter  # noqa: PLC0415  # as above

        return ConsoleExporter(stats)
    return LateExporter(partial(_make_otlp, config, resource, stats), stats)


def _make_otlp(config: Config, resource: Attributes, stats: ExportStats) -> TraceExporter:
    from torchotel.exporters.limits import SpanLimits  # noqa: PLC0415  # on the worker: a tenth of `instrument()`
    from torchotel.exporters.otlp.sender import make_transport  # noqa: PLC0415  # as above
    from torchotel.exporters.otlp.trace_exporter import RequestExporter  # noqa: PLC0415  # as above
    from torchotel.exporters.otlp.transport import TRACES  # noqa: PLC0415  # as above

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
    return RequestExporter(transport, resource=resource, version=version, limits=limits, stats=stats, rest=rest)


def rest() -> None:
    """Let the training thread have the GIL: the worker calls this after each slice of its work."""
    time.sleep(REST_S)
