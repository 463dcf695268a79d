"""The environment variables of OpenTelemetry's specification, and their effect on torchotel.

https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/ and
https://opentelemetry.io/docs/specs/otel/protocol/exporter/, read in 2026. The table of `docs/environment.md` is made
from this file, and `tests/test_variables_*.py` sets each variable.
"""

from collections.abc import Iterator, Mapping
from typing import Final, Literal, NamedTuple, TypeAlias

Reader: TypeAlias = Literal["torchotel", "SDK", "provider", "none"]
"""`torchotel`: a field of `Config`. `SDK`: functions of the SDK that torchotel calls. `provider`: the TracerProvider of
the user, or of `set_global_provider`. `none`: the variable has no effect."""

_NO_LOGS = "not used: torchotel exports no logs"
_CONFIG_FILE: Final = (
    "a file of declarative configuration: with `disabled: true` no hook is installed; else a warning says "
    "that torchotel reads nothing else of it"
)
_NO_ZIPKIN = "not used: torchotel has no Zipkin exporter; Zipkin receives OTLP"
_BATCHES = (
    "applies to the batch processor of your own spans; torchotel exports each second, in batches of up to 4,000 spans"
)


class Variable(NamedTuple):
    """A variable of the specification."""

    name: str
    reader: Reader
    does: str


def _unread(does: str, *names: str) -> Iterator[Variable]:
    for name in names:
        yield Variable(name, "none", does)


def _otlp() -> Iterator[Variable]:
    """Return each option of the OTLP exporter: the general variable and those of the signals."""
    options = {
        "ENDPOINT": "base URL, over HTTP `/v1/traces` and `/v1/metrics` are added; over gRPC a URL or `host:port`",
        "PROTOCOL": "`http/protobuf` (the default) or `grpc`; `http/json` is ignored with a warning",
        "HEADERS": "`name=value,…`, values URL-encoded; other headers are ignored with a warning",
        "COMPRESSION": "`gzip` (the default) or `none`; `deflate` is ignored with a warning",
        "TIMEOUT": "timeout of one attempt, in **seconds** as in OpenTelemetry for Python; 10",
        "CERTIFICATE": "PEM file of the certificate authorities",
        "CLIENT_CERTIFICATE": "PEM file of the client's certificate",
        "CLIENT_KEY": "PEM file of the client's private key; not needed if the certificate's file has the key",
        "INSECURE": "`true`: a gRPC endpoint without a scheme is called without TLS; a scheme wins",
    }
    for option, does in options.items():
        yield Variable(f"OTEL_EXPORTER_OTLP_{option}", "torchotel", does)
        for signal in ("TRACES", "METRICS"):
            own = "the full URL, used verbatim" if option == "ENDPOINT" else "wins over the general variable"
            yield Variable(f"OTEL_EXPORTER_OTLP_{signal}_{option}", "torchotel", f"for {signal.lower()}: {own}")
        yield Variable(f"OTEL_EXPORTER_OTLP_LOGS_{option}", "none", _NO_LOGS)
    yield Variable(
        "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE",
        "torchotel",
        "`cumulative` (the default), `delta` or `lowmemory`, for metrics over OTLP",
    )
    yield Variable(
        "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION",
        "torchotel",
        "`explicit_bucket_histogram` (the default) or `base2_exponential_bucket_histogram`, for metrics over OTLP",
    )
    old = "not used: the old name of `OTEL_EXPORTER_OTLP_{}_INSECURE`"
    yield from _unread(old.format("TRACES"), "OTEL_EXPORTER_OTLP_SPAN_INSECURE")
    yield from _unread(old.format("METRICS"), "OTEL_EXPORTER_OTLP_METRIC_INSECURE")


SECTIONS: Final[Mapping[str, tuple[Variable, ...]]] = {
    "General": (
        Variable("OTEL_SDK_DISABLED", "torchotel", "`true`: no hook is installed and nothing is exported"),
        Variable("OTEL_SERVICE_NAME", "torchotel", "`service.name`; default: the script's name"),
        Variable("OTEL_RESOURCE_ATTRIBUTES", "SDK", "`name=value,…` of the resource, values URL-encoded"),
        Variable(
            "OTEL_TRACES_SAMPLER",
            "torchotel",
            "the head sampler of traces; failed, slow and non-finite steps are kept in addition, except with "
            "`always_off` and `parentbased_always_off`. Unknown samplers, and those of Jaeger and X-Ray, are ignored "
            "with a warning",
        ),
        Variable("OTEL_TRACES_SAMPLER_ARG", "torchotel", "share of traces that a `traceidratio` sampler keeps; 1"),
        Variable("OTEL_CONFIG_FILE", "torchotel", _CONFIG_FILE),
        Variable("OTEL_EXPERIMENTAL_CONFIG_FILE", "torchotel", "the old name of `OTEL_CONFIG_FILE`"),
        *_unread("not used: set the level of the logger `torchotel`", "OTEL_LOG_LEVEL"),
        *_unread("not used: torchotel propagates no context; instrumentations of clients read it", "OTEL_PROPAGATORS"),
        *_unread("not used: not in the SDK for Python", "OTEL_ENTITIES"),
    ),
    "Which exporters": (
        Variable(
            "OTEL_TRACES_EXPORTER",
            "torchotel",
            "`otlp` (the default), `console` or `none`; of both, `otlp`. Other names are ignored with a warning",
        ),
        Variable(
            "OTEL_METRICS_EXPORTER",
            "torchotel",
            "`prometheus` (the default), `otlp`, both with a comma between, or `none`. "
            "Other names are ignored with a warning. opentelemetry-distro sets it to `otlp` if it is unset; with that "
            "package `prometheus` needs `opentelemetry-exporter-prometheus`, else nothing is instrumented",
        ),
        *_unread(_NO_LOGS, "OTEL_LOGS_EXPORTER"),
    ),
    "OTLP": tuple(_otlp()),
    "Limits of spans": (
        Variable(
            "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "torchotel", "most attributes of a span; 128. The last ones are dropped"
        ),
        Variable(
            "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", "torchotel", "most characters of a span's attribute; no limit"
        ),
        Variable("OTEL_SPAN_EVENT_COUNT_LIMIT", "torchotel", "most events of a span; 128"),
        Variable("OTEL_SPAN_LINK_COUNT_LIMIT", "torchotel", "most links of a span; 128"),
        Variable("OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT", "torchotel", "most attributes of an event; 128"),
        Variable("OTEL_LINK_ATTRIBUTE_COUNT_LIMIT", "torchotel", "most attributes of a link; 128"),
        Variable("OTEL_ATTRIBUTE_COUNT_LIMIT", "torchotel", "default of the three limits of attribute counts"),
        Variable(
            "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT",
            "torchotel",
            "most characters of an attribute of an event or a link, and default of the limit of spans",
        ),
    ),
    "Metrics": (
        Variable(
            "OTEL_METRIC_EXPORT_INTERVAL", "torchotel", "milliseconds between two exports of metrics over OTLP; 60,000"
        ),
        Variable(
            "OTEL_METRIC_EXPORT_TIMEOUT", "torchotel", "milliseconds until an export of metrics times out; 30,000"
        ),
        Variable(
            "OTEL_METRICS_EXEMPLAR_FILTER",
            "torchotel",
            "`trace_based` (the default) and `always_on`: exemplars name exported traces, and kept traces if metrics "
            "are pushed; `always_off`: no exemplars",
        ),
    ),
    "Prometheus": (
        Variable("OTEL_EXPORTER_PROMETHEUS_HOST", "torchotel", "address of the scrape endpoint; `127.0.0.1`"),
        Variable(
            "OTEL_EXPORTER_PROMETHEUS_PORT", "torchotel", "port of the scrape endpoint; the local rank is added; 9464"
        ),
    ),
    "Batches of spans": (
        Variable("OTEL_BSP_SCHEDULE_DELAY", "provider", _BATCHES),
        Variable("OTEL_BSP_EXPORT_TIMEOUT", "provider", _BATCHES),
        Variable("OTEL_BSP_MAX_QUEUE_SIZE", "provider", _BATCHES),
        Variable("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "provider", _BATCHES),
    ),
    "Of Python's SDK": (
        Variable(
            "OTEL_EXPERIMENTAL_RESOURCE_DETECTORS",
            "SDK",
            "detectors of the resource: `os`, `process`, …; [`torchotel`](ranks.md) adds rank and run",
        ),
        *_unread(
            "not used: ids are random, except those of `torch.run` with several ranks, which are a hash of the run id",
            "OTEL_PYTHON_ID_GENERATOR",
        ),
    ),
    "Of no use here": (
        *_unread(
            _NO_LOGS,
            "OTEL_BLRP_SCHEDULE_DELAY",
            "OTEL_BLRP_EXPORT_TIMEOUT",
            "OTEL_BLRP_MAX_QUEUE_SIZE",
            "OTEL_BLRP_MAX_EXPORT_BATCH_SIZE",
            "OTEL_LOGRECORD_ATTRIBUTE_COUNT_LIMIT",
            "OTEL_LOGRECORD_ATTRIBUTE_VALUE_LENGTH_LIMIT",
        ),
        *_unread(
            _NO_ZIPKIN,
            "OTEL_EXPORTER_ZIPKIN_ENDPOINT",
            "OTEL_EXPORTER_ZIPKIN_TIMEOUT",
            "OTEL_EXPORTER_ZIPKIN_PROTOCOL",
        ),
    ),
}
"""All variables, by the sections of the page."""

VARIABLES: Final[Mapping[str, Variable]] = {
    variable.name: variable for section in SECTIONS.values() for variable in section
}
