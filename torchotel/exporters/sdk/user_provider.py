"""Create the SDK's tracer provider for the program's own spans, with `set_global_provider=True`."""

import logging

import requests
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.sdk.version import __version__

from torchotel import _semconv
from torchotel.config.config import Config
from torchotel.config.otlp_endpoint import OtlpEndpoint, host_without_proxy
from torchotel.exporters.sanitize import otlp_safe
from torchotel.exporters.sdk.tracer_provider import OwnRandomIds
from torchotel.tracing.span import Attributes

_logger = logging.getLogger("torchotel")


def make_provider(config: Config, resource: Attributes) -> TracerProvider:
    """Create a provider that exports to the endpoint of torchotel's own spans."""
    attributes = {**otlp_safe(resource), _semconv.SDK_NAME: "opentelemetry", _semconv.SDK_VERSION: __version__}
    length, event_length = config.attribute_value_length_limit, config.event_value_length_limit
    limits = SpanLimits(  # explicit: else the SDK reads the variables and raises on malformed ones
        max_events=config.event_count_limit,
        max_links=config.link_count_limit,
        max_attributes=SpanLimits.UNSET,  # the following limits apply
        max_span_attributes=config.attribute_count_limit,
        max_event_attributes=config.event_attribute_count_limit,
        max_link_attributes=config.link_attribute_count_limit,
        max_attribute_length=SpanLimits.UNSET if event_length is None else event_length,
        max_span_attribute_length=SpanLimits.UNSET if length is None else length,
    )
    provider = TracerProvider(
        resource=Resource(attributes, _semconv.SCHEMA_URL), id_generator=OwnRandomIds(), span_limits=limits
    )
    provider.add_span_processor(_make_processor(_make_exporter(config)))
    return provider


def _make_processor(exporter: SpanExporter) -> BatchSpanProcessor:
    """Create the batch processor of the OTEL_BSP_* variables, or of their defaults if the SDK refuses the values."""
    try:
        return BatchSpanProcessor(exporter)
    except ValueError as error:
        _logger.warning(
            "The SDK refused the OTEL_BSP_* variables (%s): the program's own spans are exported with the defaults of "
            "the specification. Correct the variable that the error names.",
            str(error).removesuffix("."),
        )
    return BatchSpanProcessor(  # explicit: else the SDK reads the variables again
        exporter,
        max_queue_size=2048,
        schedule_delay_millis=5000,
        max_export_batch_size=512,
        export_timeout_millis=30_000,
    )


def _make_exporter(config: Config) -> SpanExporter:
    """Create the SDK's exporter to the endpoint of torchotel's spans."""
    otlp_endpoint = config.otlp_endpoint("traces")
    if config.traces_exporter == "console":
        return ConsoleSpanExporter()
    return _grpc_exporter(otlp_endpoint) if otlp_endpoint.protocol == "grpc" else _http_exporter(otlp_endpoint)


def _http_exporter(otlp_endpoint: OtlpEndpoint) -> SpanExporter:
    session = requests.Session()
    session.trust_env = host_without_proxy(otlp_endpoint.endpoint) is None  # True: proxies of the environment are used
    return HttpSpanExporter(
        otlp_endpoint.endpoint,
        session=session,
        certificate_file=otlp_endpoint.certificate,
        client_certificate_file=otlp_endpoint.client_certificate,
        client_key_file=otlp_endpoint.client_key,
        headers=dict(otlp_endpoint.headers),
        timeout=otlp_endpoint.timeout_s,
        compression=Compression.Gzip if otlp_endpoint.compression == "gzip" else Compression.NoCompression,
    )


def _grpc_exporter(otlp_endpoint: OtlpEndpoint) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.grpc import trace_exporter  # noqa: PLC0415  # grpc is not needed for HTTP

    from torchotel.exporters.otlp.grpc import (  # noqa: PLC0415  # imports grpc, which HTTP does not need
        compression,
        credentials,
        metadata,
        read_target,
    )

    target = read_target(otlp_endpoint.endpoint, insecure=otlp_endpoint.insecure)
    return trace_exporter.OTLPSpanExporter(
        target.address,
        insecure=not target.secure,
        credentials=credentials(otlp_endpoint) if target.secure else None,
        headers=dict(metadata(otlp_endpoint.headers)),
        timeout=otlp_endpoint.timeout_s,
        compression=compression(otlp_endpoint),
    )
