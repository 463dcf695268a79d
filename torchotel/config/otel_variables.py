"""What every environment variable of OpenTelemetry's specification does here.

https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/ and
https://opentelemetry.io/docs/specs/otel/protocol/exporter/, read in 2026. `docs/environment.md` is made of this, and
`tests/config/test_otel_variables_*.py` sets each of them.
"""

from collections.abc import Iterator, Mapping
from typing import Final, Literal, NamedTuple, TypeAlias

Reader: TypeAlias = Literal["torchotel", "SDK", "provider", "nobody"]
"""`torchotel`: a field of its configuration. `SDK`: what torchotel calls of it. `provider`: the TracerProvider that
`set_global_provider` sets, and one of the user's. `nobody`: it means nothing here."""

_NO_LOGS = "not ours: torchotel sends no logs"
_CONFIG_FILE: Final = (
    "a file of declarative configuration: with `disabled: true` no hook is installed; a warning says that torchotel "
    "reads nothing else of it"
)
_NO_ZIPKIN = "not ours: there is no Zipkin exporter; Zipkin takes OTLP"
_BATCHES = "of the processor for your own spans; our batches leave with each second and hold up to 4,000 spans"


class Variable(NamedTuple):
    """One variable."""

    name: str
    reader: Reader
    does: str


def _unread(does: str, *names: str) -> Iterator[Variable]:
    for name in names:
        yield Variable(name, "nobody", does)


def _otlp() -> Iterator[Variable]:
    """Give each option of the exporter in its general form and those of the signals."""
    options = {
        "ENDPOINT": "base URL, over HTTP `/v1/traces` and `/v1/metrics` are added; over gRPC a URL or `host:port`",
        "PROTOCOL": "`http/protobuf` (the default) or `grpc`; `http/json` is left out with a warning",
        "HEADERS": "`name=value,…`, values URL-encoded; what cannot be read so is left out with a warning",
        "COMPRESSION": "`gzip` (the default) or `none`; `deflate` is left out with a warning",
        "TIMEOUT": "longest wait for the answer to an attempt, in **seconds** as in OpenTelemetry for Python; 10",
        "CERTIFICATE": "PEM file of the authorities that may sign the server's certificate",
        "CLIENT_CERTIFICATE": "PEM file that says who this client is",
        "CLIENT_KEY": "PEM file of its private key; not needed where the certificate's file has it",
        "INSECURE": "`true`: a gRPC endpoint without a scheme is called without TLS; a scheme wins over it",
    }
    for option, does in options.items():
        yield Variable(f"OTEL_EXPORTER_OTLP_{option}", "torchotel", does)
        for signal in ("TRACES", "METRICS"):
            own = "the whole URL, taken verbatim" if option == "ENDPOINT" else "wins over the general one"
            yield Variable(f"OTEL_EXPORTER_OTLP_{signal}_{option}", "torchotel", f"for {signal.lower()}: {own}")
        yield Variable(f"OTEL_EXPORTER_OTLP_LOGS_{option}", "nobody", _NO_LOGS)
    yield Variable(
        "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE",
        "torchotel",
        "`cumulative` (the default), `delta` or `lowmemory`, for metrics pushed over OTLP",
    )
    yield Variable(
        "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION",
        "torchotel",
        "`explicit_bucket_histogram` (the default) or `base2_exponential_bucket_histogram`, where metrics are pushed",
    )
    old = "not ours: the old name of `OTEL_EXPORTER_OTLP_{}_INSECURE`"
    yield from _unread(old.format("TRACES"), "OTEL_EXPORTER_OTLP_SPAN_INSECURE")
    yield from _unread(old.format("METRICS"), "OTEL_EXPORTER_OTLP_METRIC_INSECURE")


SECTIONS: Final[Mapping[str, tuple[Variable, ...]]] = {
    "General": (
        Variable("OTEL_SDK_DISABLED", "torchotel", "`true`: no hook is installed and nothing is exported"),
        Variable("OTEL_SERVICE_NAME", "torchotel", "`service.name`; the script's name"),
        Variable("OTEL_RESOURCE_ATTRIBUTES", "SDK", "`name=value,…` of the resource, values URL-encoded"),
        Variable(
            "OTEL_TRACES_SAMPLER",
            "torchotel",
            "which traces are sent; what failed, was slow or went NaN is kept all the same, but for "
            "`always_off` and `parentbased_always_off`. One that is not known, "
            "and those of Jaeger and X-Ray, are ignored with a warning",
        ),
        Variable("OTEL_TRACES_SAMPLER_ARG", "torchotel", "share of traces that a `traceidratio` sampler takes; 1"),
        Variable("OTEL_CONFIG_FILE", "torchotel", _CONFIG_FILE),
        Variable("OTEL_EXPERIMENTAL_CONFIG_FILE", "torchotel", "the old name of `OTEL_CONFIG_FILE`"),
        *_unread("not ours: the logger is called `torchotel`, and `logging` sets its level", "OTEL_LOG_LEVEL"),
        *_unread("not ours: a step calls nobody; instrumentations of clients read it", "OTEL_PROPAGATORS"),
        *_unread("not ours: not in the SDK for Python", "OTEL_ENTITIES"),
    ),
    "Which exporters": (
        Variable(
            "OTEL_TRACES_EXPORTER",
            "torchotel",
            "`otlp` (the default), `console` or `none`; `otlp` of both. Other names are left out with a warning",
        ),
        Variable(
            "OTEL_METRICS_EXPORTER",
            "torchotel",
            "`prometheus` (the default), `otlp`, both with a comma between, or `none`. "
            "Other names are left out with a warning. With opentelemetry-distro, which makes it `otlp` "
            "where it is unset, `prometheus` needs `opentelemetry-exporter-prometheus`, or nothing is instrumented",
        ),
        *_unread(_NO_LOGS, "OTEL_LOGS_EXPORTER"),
    ),
    "OTLP": tuple(_otlp()),
    "Limits of spans": (
        Variable("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "torchotel", "attributes of a span; 128. The last ones go"),
        Variable("OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", "torchotel", "characters of a span's text; no limit"),
        Variable("OTEL_SPAN_EVENT_COUNT_LIMIT", "torchotel", "events of a span; 128"),
        Variable("OTEL_SPAN_LINK_COUNT_LIMIT", "torchotel", "links of a span; 128"),
        Variable("OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT", "torchotel", "attributes of an event; 128"),
        Variable("OTEL_LINK_ATTRIBUTE_COUNT_LIMIT", "torchotel", "attributes of a link; 128"),
        Variable("OTEL_ATTRIBUTE_COUNT_LIMIT", "torchotel", "where the three for attributes are not set"),
        Variable(
            "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT",
            "torchotel",
            "the same for events and links, and where that of spans is not set",
        ),
    ),
    "Metrics": (
        Variable("OTEL_METRIC_EXPORT_INTERVAL", "torchotel", "milliseconds between two pushes over OTLP; 60,000"),
        Variable("OTEL_METRIC_EXPORT_TIMEOUT", "torchotel", "milliseconds after which a push is given up; 30,000"),
        Variable(
            "OTEL_METRICS_EXEMPLAR_FILTER",
            "torchotel",
            "`trace_based` (the default) and `always_on`: exemplars lead to traces that arrived; `always_off`: none",
        ),
    ),
    "Prometheus": (
        Variable("OTEL_EXPORTER_PROMETHEUS_HOST", "torchotel", "address of the scrape endpoint; `127.0.0.1`"),
        Variable("OTEL_EXPORTER_PROMETHEUS_PORT", "torchotel", "its port, to which the local rank is added; 9464"),
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
            "detectors that add to the resource: `os`, `process`, …; [`torchotel`](ranks.md): rank and run",
        ),
        *_unread(
            "not ours: ids are random, except those of `torch.run`, which are a hash of the run id",
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
"""All of them, by the sections of the page."""

VARIABLES: Final[Mapping[str, Variable]] = {
    variable.name: variable for section in SECTIONS.values() for variable in section
}
