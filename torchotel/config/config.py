"""All settings in one frozen value; the only place that reads the environment for them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias, cast

from torchotel._types import UNSET, ConfigError
from torchotel._utils.faults import warn_once
from torchotel._utils.process import MAX_PORT
from torchotel._utils.text import shortened
from torchotel.config import config_file
from torchotel.config import validators as checks
from torchotel.config.otlp_endpoint import (
    OtlpCompression,
    OtlpEndpoint,
    OtlpProtocol,
    default_endpoint,
    signal_endpoint,
    without_credentials,
)
from torchotel.config.settings import (
    EXPORT,
    SCRAPING,
    Setting,
    choice,
    choices,
    env,
    first,
    having,
    integer,
    only,
    optional,
    otlp,
    without,
)

Detail: TypeAlias = Literal["auto", "all", "off"] | int
PlainValue: TypeAlias = str | bool | int | float | tuple[str, ...]

GradientNormsSetting: TypeAlias = Literal["auto"] | bool | int

BACKENDS_VARIABLE: Final = "TORCHOTEL_BACKENDS"
"""Folder of the servers that `torchotel stack` runs without containers: no setting."""
_PROTOCOLS_OF = {"endpoint": "protocol", "traces_endpoint": "protocol", "metrics_endpoint": "metrics_protocol"}
"""Fields whose form depends on another field."""

_EXPORTERS: Final = choice("otlp", "console", "none")._replace(ours=first("otlp", "console"))
_PROTOCOLS: Final = choice("http/protobuf", "grpc")._replace(ours=without("http/json"))
_COMPRESSIONS: Final = choice("gzip", "none")._replace(ours=without("deflate"))
_TEMPORALITIES: Final = choice("cumulative", "delta", "lowmemory")
_HISTOGRAMS: Final = choice("explicit_bucket_histogram", "base2_exponential_bucket_histogram")
_EXEMPLARS: Final = choice("trace_based", "always_on", "always_off")
_EXCEPTION_TEXT: Final = choice("type", "first_line", "full")
_LIMIT: Final = integer(0)
_LENGTH: Final = optional(integer(0))
_DEPTH: Final = optional(integer(0), word="none")
_SPANS: Final = optional(integer(10), word="none")
_RUN_ID: Final = optional(checks.TEXT, word="none")
_TEXT: Final = optional(checks.TEXT)
_FOLDER: Final = optional(checks.FOLDER)
_FILE: Final = optional(checks.FILE)
_METRICS: Final = choices("prometheus", "otlp")._replace(ours=only("prometheus", "otlp"))
_PORT: Final = optional(integer(0, MAX_PORT), word="none")
_TRACER_PROVIDER: Final = optional(having("get_tracer"))
_METER_PROVIDER: Final = optional(having("get_meter"))
_REGISTRY: Final = optional(having("register", "unregister"))
_PATTERNS: Final = optional(checks.PATTERNS)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Config:
    """What `instrument()` was told; every value is checked, and in its one form, once this exists."""

    service_name: Annotated[str | None, env(_TEXT, "OTEL_SERVICE_NAME", group=EXPORT)] = None
    """`service.name`; None: the name of the script, or of the module as `python -m` has it."""
    protocol: Annotated[OtlpProtocol, otlp(_PROTOCOLS, "PROTOCOL")] = "http/protobuf"
    """How traces travel."""
    metrics_protocol: Annotated[OtlpProtocol, otlp(_PROTOCOLS, "PROTOCOL", signal="METRICS")] = "http/protobuf"
    """How metrics travel: the argument `protocol`, or their own variables."""
    endpoint: Annotated[str, env(checks.BASE_URL, "OTEL_EXPORTER_OTLP_ENDPOINT", group=EXPORT)] = (
        "http://localhost:4318"
    )
    """Base URL of an OTLP receiver; over HTTP the signal's path is added. The default's port is 4317 for gRPC."""
    traces_endpoint: Annotated[str, env(checks.URL, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", group=EXPORT)] = ""
    """Full URL that traces are posted to; left out: `endpoint` with `/v1/traces`. By its variable only."""
    metrics_endpoint: Annotated[str, env(checks.URL, "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", group=EXPORT)] = ""
    """Full URL that metrics are posted to; left out: `endpoint` with `/v1/metrics`. By its variable only."""
    headers: Annotated[Mapping[str, str], otlp(checks.HEADERS, "HEADERS", secret=True)] = field(default_factory=dict)
    """Headers of each request. They carry credentials, so they are never shown."""
    metrics_headers: Annotated[Mapping[str, str], otlp(checks.HEADERS, "HEADERS", signal="METRICS", secret=True)] = (
        field(default_factory=dict)
    )
    """Headers of each request with metrics: the argument `headers`, or their own variables."""
    compression: Annotated[OtlpCompression, otlp(_COMPRESSIONS, "COMPRESSION")] = "gzip"
    """Of request bodies."""
    metrics_compression: Annotated[OtlpCompression, otlp(_COMPRESSIONS, "COMPRESSION", signal="METRICS")] = "gzip"
    """Of request bodies with metrics: the argument `compression`, or its own variables."""
    timeout_s: Annotated[float, otlp(checks.SECONDS, "TIMEOUT")] = 10.0
    """Longest wait for an answer to one request."""
    metrics_timeout_s: Annotated[float, otlp(checks.SECONDS, "TIMEOUT", signal="METRICS")] = 10.0
    """The same for a request with metrics. By its variables only."""
    certificate: Annotated[str | None, otlp(_FILE, "CERTIFICATE")] = None
    """PEM file of the authorities that may sign the server's certificate; None: the usual ones."""
    metrics_certificate: Annotated[str | None, otlp(_FILE, "CERTIFICATE", signal="METRICS")] = None
    """The same for metrics. By its variables only."""
    client_certificate: Annotated[str | None, otlp(_FILE, "CLIENT_CERTIFICATE", secret=True)] = None
    """PEM file that says who this client is, for mutual TLS."""
    metrics_client_certificate: Annotated[
        str | None, otlp(_FILE, "CLIENT_CERTIFICATE", signal="METRICS", secret=True)
    ] = None
    """The same for metrics. By its variables only."""
    client_key: Annotated[str | None, otlp(_FILE, "CLIENT_KEY", secret=True)] = None
    """PEM file of the client certificate's private key; None: it is in the certificate's file."""
    metrics_client_key: Annotated[str | None, otlp(_FILE, "CLIENT_KEY", signal="METRICS", secret=True)] = None
    """The same for metrics. By its variables only."""
    insecure: Annotated[bool, otlp(checks.OTEL_FLAG, "INSECURE")] = False
    """Whether a gRPC endpoint without a scheme is called without TLS. By its variables only."""
    metrics_insecure: Annotated[bool, otlp(checks.OTEL_FLAG, "INSECURE", signal="METRICS")] = False
    """The same for metrics. By its variables only."""
    metrics_interval_s: Annotated[float, env(checks.MILLISECONDS, "OTEL_METRIC_EXPORT_INTERVAL")] = 60.0
    """Time between two pushes of metrics. By its variable only, which has milliseconds."""
    metrics_export_timeout_s: Annotated[float, env(checks.TIMEOUT_MILLISECONDS, "OTEL_METRIC_EXPORT_TIMEOUT")] = 30.0
    """Time after which a push of metrics is given up. By its variable only, which has milliseconds."""
    metrics_temporality: Annotated[
        Literal["cumulative", "delta", "lowmemory"],
        env(_TEMPORALITIES, "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE"),
    ] = "cumulative"
    """Since when pushed counters count. By its variable only."""
    metrics_histograms: Annotated[
        Literal["explicit_bucket_histogram", "base2_exponential_bucket_histogram"],
        env(_HISTOGRAMS, "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION"),
    ] = "explicit_bucket_histogram"
    """What pushed histograms are. By its variable only."""
    traces_exporter: Annotated[
        Literal["otlp", "console", "none"], env(_EXPORTERS, "OTEL_TRACES_EXPORTER", group=EXPORT)
    ] = "otlp"
    """Where traces go, besides the run file."""
    sampler: Annotated[str, env(checks.SAMPLER, "OTEL_TRACES_SAMPLER")] = checks.DEFAULT_SAMPLER
    """Which traces are sent, by OpenTelemetry's names of samplers. By its variable only."""
    sampler_ratio: Annotated[float, env(checks.RATIO, "OTEL_TRACES_SAMPLER_ARG")] = 1.0
    """Share of traces that a `traceidratio` sampler keeps. By its variable only."""
    attribute_count_limit: Annotated[
        int, env(_LIMIT, "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "OTEL_ATTRIBUTE_COUNT_LIMIT")
    ] = 128
    """Attributes of a span, the rest is left out and counted. By its variables only, as are the other limits."""
    attribute_value_length_limit: Annotated[
        int | None, env(_LENGTH, "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT")
    ] = None
    """Characters of an attribute's text, the rest is cut off; None: no limit."""
    event_value_length_limit: Annotated[int | None, env(_LENGTH, "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT")] = None
    """The same for attributes of events and links."""
    event_count_limit: Annotated[int, env(_LIMIT, "OTEL_SPAN_EVENT_COUNT_LIMIT")] = 128
    """Events of a span."""
    link_count_limit: Annotated[int, env(_LIMIT, "OTEL_SPAN_LINK_COUNT_LIMIT")] = 128
    """Links of a span."""
    event_attribute_count_limit: Annotated[
        int, env(_LIMIT, "OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT", "OTEL_ATTRIBUTE_COUNT_LIMIT")
    ] = 128
    """Attributes of an event."""
    link_attribute_count_limit: Annotated[
        int, env(_LIMIT, "OTEL_LINK_ATTRIBUTE_COUNT_LIMIT", "OTEL_ATTRIBUTE_COUNT_LIMIT")
    ] = 128
    """Attributes of a link."""
    metrics_exporter: Annotated[tuple[str, ...], env(_METRICS, "OTEL_METRICS_EXPORTER", group=EXPORT)] = ("prometheus",)
    """Ways out of metrics; empty: none."""
    exemplar_filter: Annotated[
        Literal["trace_based", "always_on", "always_off"], env(_EXEMPLARS, "OTEL_METRICS_EXEMPLAR_FILTER")
    ] = "trace_based"
    """Whether histograms have exemplars, which lead to exported traces; `always_off`: none. By its variable only."""
    tracer_provider: Annotated[Any, env(_TRACER_PROVIDER, group=EXPORT)] = None
    """Spans are replayed through it; None: through the global one where there is one, else sent by ourselves."""
    meter_provider: Annotated[Any, env(_METER_PROVIDER, group=EXPORT)] = None
    """Metrics are instruments of it too; None: of none of the user's."""
    set_global_provider: Annotated[bool, env(checks.FLAG, "TORCHOTEL_SET_GLOBAL_PROVIDER", group=EXPORT)] = False
    """Whether a TracerProvider is set for the user's own spans where there is none."""
    prometheus_port: Annotated[int | None, env(_PORT, "OTEL_EXPORTER_PROMETHEUS_PORT", group=SCRAPING)] = 9464
    """Port of the first local rank's scrape endpoint, the next rank's is one higher; 0: any free one, None: none."""
    prometheus_host: Annotated[str, env(checks.HOST, "OTEL_EXPORTER_PROMETHEUS_HOST", group=SCRAPING)] = "127.0.0.1"
    """Address that the scrape endpoint listens on."""
    prometheus_registry: Annotated[Any, env(_REGISTRY, group=SCRAPING)] = None
    """Metrics are collected there and no server is started; None: a registry and a server of our own."""
    discovery_dir: Annotated[Path | None, env(_FOLDER, "TORCHOTEL_DISCOVERY_DIR", group=SCRAPING)] = None
    """Folder of a file that names the scrape endpoint to Prometheus's file_sd; None: the stack's, if any."""
    record: Annotated[Path | None, env(_FOLDER, "TORCHOTEL_RECORD")] = None
    """Folder of the run file; if it holds a run already, a free name beside it is used. None: no run file."""
    detail: Annotated[Detail, env(checks.DETAIL, "TORCHOTEL_DETAIL")] = "auto"
    """Steps that get module spans: within the budget, every one, every n-th, or none."""
    overhead_budget: Annotated[float, env(checks.BUDGET, "TORCHOTEL_OVERHEAD_BUDGET")] = 0.01
    """Share of step time that detail may cost, with detail="auto"; the fixed cost of each step is not counted."""
    include: Annotated[tuple[str, ...] | None, env(_PATTERNS, "TORCHOTEL_INCLUDE")] = None
    """Patterns of the module paths that get spans; None: all."""
    exclude: Annotated[tuple[str, ...] | None, env(_PATTERNS, "TORCHOTEL_EXCLUDE")] = None
    """Patterns of the module paths that get none; it beats `include`."""
    max_depth: Annotated[int | None, env(_DEPTH, "TORCHOTEL_MAX_DEPTH")] = None
    """Deepest level of modules that get spans; the root is 0, None: no limit."""
    max_spans: Annotated[int | None, env(_SPANS, "TORCHOTEL_MAX_SPANS")] = 2000
    """Spans of one trace, beyond which deeper modules fold into their parents; None: no limit."""
    module_histograms: Annotated[bool, env(checks.FLAG, "TORCHOTEL_MODULE_HISTOGRAMS")] = False
    """Whether `torch.module.duration` is kept: 18 series for each module and direction."""
    gradient_norms: Annotated[GradientNormsSetting, env(checks.GRADIENT_NORMS, "TORCHOTEL_GRADIENT_NORMS")] = "auto"
    """Steps whose gradient norms are taken: detailed ones and some after a NaN loss, every one, every n-th, or none."""
    shapes: Annotated[bool, env(checks.FLAG, "TORCHOTEL_SHAPES")] = True
    """Whether shapes of inputs and outputs are recorded."""
    exception_text: Annotated[
        Literal["type", "first_line", "full"], env(_EXCEPTION_TEXT, "TORCHOTEL_EXCEPTION_TEXT")
    ] = "first_line"
    """How much of an exception's text is recorded: its class only, the first line, or all of it."""
    run_id: Annotated[str | None, env(_RUN_ID, "TORCHOTEL_RUN_ID")] = None
    """The run, the same on all its ranks; None: the launcher's job id, else one that ranks agree on, else random."""
    disabled: Annotated[bool, env(checks.OTEL_FLAG, "OTEL_SDK_DISABLED")] = False
    """No hook is installed and nothing is exported."""

    def __post_init__(self) -> None:
        """Check every value and bring it into its one form."""
        for signal in ("traces", "metrics"):
            name = f"{signal}_endpoint"
            if getattr(self, name) == "":
                base = self._setting("endpoint").checked("endpoint", self.endpoint)
                protocol = getattr(self, _PROTOCOLS_OF[name])
                object.__setattr__(self, name, signal_endpoint(base, signal, protocol))
        for name in SETTINGS:
            object.__setattr__(self, name, self._setting(name).checked(name, getattr(self, name)))
        for signal in ("", "metrics_"):
            key = getattr(self, f"{signal}client_key")
            if key is not None and getattr(self, f"{signal}client_certificate") is None:
                takes = "None where there is no client_certificate"
                raise ConfigError(f"{signal}client_key", key, takes)

    @classmethod
    def read(cls, given: Mapping[str, object], environ: Mapping[str, str]) -> "Config":
        """Read each argument that is not in `given`, or is UNSET there, from its variable.

        A bad value of a variable of OpenTelemetry is ignored with a warning.

        Raises:
            ConfigError: An argument, or a variable of torchotel's own, has a bad value; the error names it.
        """
        values: dict[str, Any] = {name: value for name, value in given.items() if value is not UNSET}
        if "disabled" not in values and (
            SETTINGS["disabled"].read("disabled", environ) is True or config_file.disables(environ)
        ):
            # What is off must not fail on a variable that was meant for another program.
            return cls(**values, disabled=True)
        # Said in the program, so it beats the variables of the same thing for one signal.
        if "endpoint" in values:
            values = {"traces_endpoint": "", "metrics_endpoint": "", **values}
        for name in ("protocol", "headers", "compression"):
            if name in values:
                values.setdefault(f"metrics_{name}", values[name])
        for name in SETTINGS:
            if name not in values and (value := _setting(name, values).read(name, environ)) is not UNSET:
                values[name] = value
        _add_default_endpoints(values)
        _drop_lone_keys(values, given)
        _warn_of_unknown(environ)
        return cls(**values)

    def receiver(self, signal: Literal["traces", "metrics"]) -> OtlpEndpoint:
        """Say where a signal goes over OTLP, and how."""
        prefix = "" if signal == "traces" else f"{signal}_"
        how: dict[str, Any] = {
            name: getattr(self, prefix + name) for name in OtlpEndpoint._fields if name != "endpoint"
        }
        return OtlpEndpoint(getattr(self, f"{signal}_endpoint"), **how)

    def _setting(self, name: str) -> Setting:
        return _setting(name, {protocol: getattr(self, protocol) for protocol in _PROTOCOLS_OF.values()})

    def public(self) -> dict[str, PlainValue]:
        """Give what may be shown and sent: set fields as plain values, without credentials."""
        shown: dict[str, PlainValue] = {}
        for name, setting in SETTINGS.items():
            value = getattr(self, name)
            if value is None or setting.secret:
                continue
            if name.endswith("endpoint"):
                value = without_credentials(value)
            if not setting.variables:
                value = type(value).__qualname__
            shown[name] = shortened(str(value)) if isinstance(value, Path | str) else value
        return shown

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{name}={value!r}' for name, value in self.public().items())})"


# Annotations are evaluated in this file, so a field's type is the Annotated form itself.
SETTINGS: Final[Mapping[str, Setting]] = {
    declared.name: cast("Any", declared.type).__metadata__[0]._replace(default=declared.default)
    for declared in fields(Config)
}
"""All settings, by the name of their field."""


def _setting(name: str, values: Mapping[str, object]) -> Setting:
    """Give a field's setting; an endpoint of gRPC may be a target without a scheme."""
    grpc = values.get(_PROTOCOLS_OF.get(name, "")) == "grpc"
    return SETTINGS[name]._replace(kind=checks.TARGET) if grpc else SETTINGS[name]


def _add_default_endpoints(values: dict[str, Any]) -> None:
    """Fill in where signals go when nobody says it: each protocol has a port of its own."""
    if "endpoint" in values:
        return
    values["endpoint"] = default_endpoint(values.get("protocol"))
    if values.get("metrics_protocol") != values.get("protocol"):
        base = default_endpoint(values.get("metrics_protocol"))
        values.setdefault("metrics_endpoint", signal_endpoint(base, "metrics", values.get("metrics_protocol")))


def _drop_lone_keys(values: dict[str, Any], given: Mapping[str, object]) -> None:
    """Ignore a client key from a variable if there is no certificate that it belongs to."""
    for signal in ("", "metrics_"):
        key = f"{signal}client_key"
        if key not in given and values.get(key) is not None and values.get(f"{signal}client_certificate") is None:
            del values[key]
            warn_once("%s is ignored: there is no client certificate", " or ".join(SETTINGS[key].variables))


def _warn_of_unknown(environ: Mapping[str, str]) -> None:
    """Tell of variables with our prefix that no setting has: nobody else can mean them."""
    known = {name for setting in SETTINGS.values() for name in setting.variables} | {BACKENDS_VARIABLE}
    for name in sorted(environ):
        if name.startswith("TORCHOTEL_") and name not in known:
            warn_once("%s is not known to torchotel and ignored; `torchotel doctor` says what may be meant", name)
