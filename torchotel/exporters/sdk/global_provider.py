"""Which tracer provider there is, and the one that we set where there is none."""

import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from opentelemetry.trace import (
    NoOpTracerProvider,
    ProxyTracerProvider,
    TracerProvider,
    get_tracer_provider,
    set_tracer_provider,
)

from torchotel import _semconv
from torchotel._utils.faults import warn_once
from torchotel.config.config import Config
from torchotel.config.otlp_endpoint import OtlpEndpoint, host_without_proxy
from torchotel.exporters.base import ExportStats
from torchotel.exporters.sanitize import otlp_safe
from torchotel.exporters.sdk.provider_flush import ProviderFlush
from torchotel.tracing.span import Attributes, Trace, TraceExporter

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter


_logger = logging.getLogger("torchotel")
_ours: TracerProvider | None = None
"""Set globally by us, and that can be done only once in a process."""


_LIMIT_VARIABLE = "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"
"""`opentelemetry.sdk.trace` reads it when it is imported, and raises ValueError unless it is a whole number."""


def import_despite_limit() -> None:
    """Import `opentelemetry.sdk.trace` without a limit that it cannot read, of which `Config` has warned.

    Metrics over OTLP and samplers import it too, and so does the program.
    """
    text = os.environ.get(_LIMIT_VARIABLE)
    if text is None or text.strip().isdecimal():
        return
    del os.environ[_LIMIT_VARIABLE]
    try:
        with suppress(ImportError):
            import opentelemetry.sdk.trace  # noqa: F401, PLC0415  # 0.1 s, and only for a malformed variable
    finally:
        os.environ[_LIMIT_VARIABLE] = text


def find_provider(given: TracerProvider | None) -> TracerProvider | None:
    """Return the provider that spans are replayed through: the given one, else the global one if it isn't ours."""
    if given is not None:
        return given
    current = _global_provider()
    none = isinstance(current, ProxyTracerProvider | NoOpTracerProvider) or current is _ours
    return None if none else current


def _global_provider() -> TracerProvider | None:
    """Return the global provider, or None if OTEL_PYTHON_TRACER_PROVIDER names one that cannot be loaded.

    The API loads it at the first call (opentelemetry.util._providers) and raises what its entry point raises.
    """
    try:
        return get_tracer_provider()
    except Exception as error:  # noqa: BLE001  # an entry point of any package may raise anything
        warn_once(
            "No tracer provider could be loaded (%s: %s). Spans are exported without it. "
            "Check OTEL_PYTHON_TRACER_PROVIDER.",
            type(error).__name__,
            str(error),
        )
        return None


def set_provider(config: Config, resource: Attributes) -> None:
    """Set a global provider that sends the user's own spans where ours go; where one is set, warn and leave it.

    The SDK reads OTEL_TRACES_SAMPLER and OTEL_BSP_* by itself.
    """
    global _ours  # noqa: PLW0603  # the global provider can be set once in a process
    current = _global_provider()
    if current is not None and current is _ours:
        return
    if current is not None and not isinstance(current, ProxyTracerProvider):
        _logger.warning(
            "A tracer provider is set globally already, a %s: set_global_provider=True changes nothing. "
            "Leave it out, and spans are replayed through that one.",
            type(current).__qualname__,
        )
        return
    try:
        _ours = _make_provider(config, resource)
    except Exception as error:  # noqa: BLE001  # a malformed OTEL_* variable, or OTEL_PYTHON_METER_PROVIDER's entry point
        _logger.warning(
            "The SDK made no tracer provider (%s): set_global_provider=True changes nothing, and the program's own "
            "spans are not exported. Correct the OTEL_* variable.",
            str(error) or f"{type(error).__name__}; OTEL_PYTHON_METER_PROVIDER may name a provider that is not there",
        )
        return
    set_tracer_provider(_ours)


def _make_provider(config: Config, resource: Attributes) -> TracerProvider:
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415  # 0.1 s, and only on request
    from opentelemetry.sdk.trace import SpanLimits  # noqa: PLC0415  # 0.1 s, and only on request
    from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider  # noqa: PLC0415  # as above
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415  # as above
    from opentelemetry.sdk.version import __version__  # noqa: PLC0415  # the SDK is loaded on request only

    from torchotel.exporters.sdk.tracer_provider import OwnRandomIds  # noqa: PLC0415  # as above

    attributes = {**otlp_safe(resource), _semconv.SDK_NAME: "opentelemetry", _semconv.SDK_VERSION: __version__}
    length, event_length = config.attribute_value_length_limit, config.event_value_length_limit
    limits = SpanLimits(  # without arguments it reads the variables itself, and raises of those that are malformed
        max_events=config.event_count_limit,
        max_links=config.link_count_limit,
        max_attributes=SpanLimits.UNSET,  # the three below hold
        max_span_attributes=config.attribute_count_limit,
        max_event_attributes=config.event_attribute_count_limit,
        max_link_attributes=config.link_attribute_count_limit,
        max_attribute_length=SpanLimits.UNSET if event_length is None else event_length,
        max_span_attribute_length=SpanLimits.UNSET if length is None else length,
    )
    provider = SdkTracerProvider(
        resource=Resource(attributes, _semconv.SCHEMA_URL), id_generator=OwnRandomIds(), span_limits=limits
    )
    provider.add_span_processor(BatchSpanProcessor(_make_exporter(config)))
    return provider


def _make_exporter(config: Config) -> "SpanExporter":
    """Make the SDK's exporter to where our own spans go."""
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter  # noqa: PLC0415  # see above

    receiver = config.receiver("traces")
    if config.traces_exporter == "console":
        return ConsoleSpanExporter()
    return _over_grpc(receiver) if receiver.protocol == "grpc" else _over_http(receiver)


def _over_http(receiver: OtlpEndpoint) -> "SpanExporter":
    import requests  # noqa: PLC0415  # see above
    from opentelemetry.exporter.otlp.proto.http import Compression  # noqa: PLC0415  # as above
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415  # as above

    session = requests.Session()
    session.trust_env = host_without_proxy(receiver.endpoint) is None  # else the environment's proxies are used
    return OTLPSpanExporter(
        receiver.endpoint,
        session=session,
        certificate_file=receiver.certificate,
        client_certificate_file=receiver.client_certificate,
        client_key_file=receiver.client_key,
        headers=dict(receiver.headers),
        timeout=receiver.timeout_s,
        compression=Compression.Gzip if receiver.compression == "gzip" else Compression.NoCompression,
    )


def _over_grpc(receiver: OtlpEndpoint) -> "SpanExporter":
    import grpc  # noqa: PLC0415  # see above
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415  # as above

    from torchotel.exporters.otlp.grpc import credentials, metadata, read_target  # noqa: PLC0415  # as above

    target = read_target(receiver.endpoint, insecure=receiver.insecure)
    return OTLPSpanExporter(
        target.address,
        insecure=not target.secure,
        credentials=credentials(receiver) if target.secure else None,
        headers=dict(metadata(receiver.headers)),
        timeout=receiver.timeout_s,
        compression=grpc.Compression.Gzip if receiver.compression == "gzip" else grpc.Compression.NoCompression,
    )


def user_spans(stats: ExportStats) -> list[TraceExporter]:
    """Return who flushes the provider that we set, where we did."""
    return [] if _ours is None else [UserSpans(_ours, stats)]


class UserSpans(TraceExporter):
    """Flush the user's own spans with ours; it takes no traces, and the provider lives on for the next run."""

    def __init__(self, provider: TracerProvider, stats: ExportStats) -> None:
        self._flush = ProviderFlush(provider, stats)

    def export(self, trace: Trace) -> None:
        """Do nothing: traces leave by our own exporter."""

    def push(self) -> None:
        """Do nothing: the provider sends by itself."""

    def flush(self, deadline_s: float) -> bool:
        """Send the spans that the user's program ended."""
        return self._flush.by(deadline_s)

    def shutdown(self, deadline_s: float) -> None:
        """Send them a last time."""
        self._flush.by(deadline_s)
