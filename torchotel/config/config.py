"""All settings in one frozen value, and their declarations; nothing else reads the environment for settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias, cast

from torchotel._limits import MAX_CHANNEL_BYTES, MIN_CHANNEL_BYTES
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
"""A variable of `torchotel stack` that is no setting: the folder of servers that run without containers."""
_PROTOCOLS_OF = {"endpoint": "protocol", "traces_endpoint": "protocol", "metrics_endpoint": "metrics_protocol"}
"""Fields that take a gRPC target if the protocol in another field is gRPC."""

_EXPORTERS: Final = choice("otlp", "console", "none")._replace(accept=first("otlp", "console"))
_PROTOCOLS: Final = choice("http/protobuf", "grpc")._replace(accept=without("http/json"))
_COMPRESSIONS: Final = choice("gzip", "none")._replace(accept=without("deflate"))
_TEMPORALITIES: Final = choice("cumulative", "delta", "lowmemory")
_HISTOGRAMS: Final = choice("explicit_bucket_histogram", "base2_exponential_bucket_histogram")
_EXEMPLARS: Final = choice("trace_based", "always_on", "always_off")
_EXCEPTION_TEXT: Final = choice("type", "first_line", "full")
_WORKERS: Final = choice("auto", "process", "thread")
_LIMIT: Final = integer(0)
_LENGTH: Final = optional(integer(0))
_DEPTH: Final = optional(integer(0), word="none")
_SPANS: Final = optional(integer(10), word="none")
_CHANNEL: Final = integer(MIN_CHANNEL_BYTES, MAX_CHANNEL_BYTES)
_RUN_ID: Final = optional(checks.TEXT, word="none")
_TEXT: Final = optional(checks.TEXT)
_FOLDER: Final = optional(checks.FOLDER)
_FILE: Final = optional(checks.FILE)
_METRICS: Final = choices("prometheus", "otlp")._replace(accept=only("prometheus", "otlp"))
_PORT: Final = optional(integer(0, MAX_PORT), word="none")
_TRACER_PROVIDER: Final = optional(having("get_tracer"))
_METER_PROVIDER: Final = optional(having("get_meter"))
_REGISTRY: Final = optional(having("register", "unregister"))
_PATTERNS: Final = optional(checks.PATTERNS)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Config:
    """The settings of one `instrument()`; all values are validated and in normal form."""

    service_name: Annotated[str | None, env(_TEXT, "OTEL_SERVICE_NAME", group=EXPORT)] = None
    """`service.name`; None: the name of the script, or of the module that `python -m` runs."""
    protocol: Annotated[OtlpProtocol, otlp(_PROTOCOLS, "PROTOCOL")] = "http/protobuf"
    """OTLP protocol of traces."""
    metrics_protocol: Annotated[OtlpProtocol, otlp(_PROTOCOLS, "PROTOCOL", signal="METRICS")] = "http/protobuf"
    """OTLP protocol of metrics: the argument `protocol`, or the variables of metrics."""
    endpoint: Annotated[str, env(checks.BASE_URL, "OTEL_EXPORTER_OTLP_ENDPOINT", group=EXPORT)] = (
        "http://localhost:4318"
    )
    """Base URL of an OTLP receiver; over HTTP the signal's path is added. With gRPC the default has port 4317."""
    traces_endpoint: Annotated[str, env(checks.URL, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", group=EXPORT)] = ""
    """Full URL for traces; left out: `endpoint` with `/v1/traces`. Set by its variable only."""
    metrics_endpoint: Annotated[str, env(checks.URL, "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", group=EXPORT)] = ""
    """Full URL for metrics; left out: `endpoint` with `/v1/metrics`. Set by its variable only."""
    headers: Annotated[Mapping[str, str], otlp(checks.HEADERS, "HEADERS", secret=True)] = field(default_factory=dict)
    """Headers of each request with traces. They may be credentials, so they are never shown."""
    metrics_headers: Annotated[Mapping[str, str], otlp(checks.HEADERS, "HEADERS", signal="METRICS", secret=True)] = (
        field(default_factory=dict)
    )
    """Headers of each request with metrics: the argument `headers`, or the variables of metrics."""
    compression: Annotated[OtlpCompression, otlp(_COMPRESSIONS, "COMPRESSION")] = "gzip"
    """Compression of requests with traces."""
    metrics_compression: Annotated[OtlpCompression, otlp(_COMPRESSIONS, "COMPRESSION", signal="METRICS")] = "gzip"
    """Compression of requests with metrics: the argument `compression`, or the variables of metrics."""
    timeout_s: Annotated[float, otlp(checks.SECONDS, "TIMEOUT")] = 10.0
    """Seconds until a request with traces times out."""
    metrics_timeout_s: Annotated[float, otlp(checks.SECONDS, "TIMEOUT", signal="METRICS")] = 10.0
    """Seconds until a request with metrics times out. Set by its variables only."""
    certificate: Annotated[str | None, otlp(_FILE, "CERTIFICATE")] = None
    """PEM file of the certificate authorities for traces; None: those of `certifi`, or of gRPC."""
    metrics_certificate: Annotated[str | None, otlp(_FILE, "CERTIFICATE", signal="METRICS")] = None
    """PEM file of the certificate authorities for metrics. Set by its variables only."""
    client_certificate: Annotated[str | None, otlp(_FILE, "CLIENT_CERTIFICATE", secret=True)] = None
    """PEM file of the client's certificate for traces, for mutual TLS."""
    metrics_client_certificate: Annotated[
        str | None, otlp(_FILE, "CLIENT_CERTIFICATE", signal="METRICS", secret=True)
    ] = None
    """PEM file of the client's certificate for metrics. Set by its variables only."""
    client_key: Annotated[str | None, otlp(_FILE, "CLIENT_KEY", secret=True)] = None
    """PEM file of the private key of `client_certificate`; None: that file has the key, too."""
    metrics_client_key: Annotated[str | None, otlp(_FILE, "CLIENT_KEY", signal="METRICS", secret=True)] = None
    """PEM file of the private key of `metrics_client_certificate`. Set by its variables only."""
    insecure: Annotated[bool, otlp(checks.OTEL_FLAG, "INSECURE")] = False
    """Whether traces go without TLS to a gRPC endpoint without a scheme. Set by its variables only."""
    metrics_insecure: Annotated[bool, otlp(checks.OTEL_FLAG, "INSECURE", signal="METRICS")] = False
    """Whether metrics go without TLS to a gRPC endpoint without a scheme. Set by its variables only."""
    metrics_interval_s: Annotated[float, env(checks.MILLISECONDS, "OTEL_METRIC_EXPORT_INTERVAL")] = 60.0
    """Seconds between two exports of metrics over OTLP. Set by its variable only, in milliseconds."""
    metrics_export_timeout_s: Annotated[float, env(checks.TIMEOUT_MILLISECONDS, "OTEL_METRIC_EXPORT_TIMEOUT")] = 30.0
    """Seconds until an export of metrics over OTLP times out. Set by its variable only, in milliseconds."""
    metrics_temporality: Annotated[
        Literal["cumulative", "delta", "lowmemory"],
        env(_TEMPORALITIES, "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE"),
    ] = "cumulative"
    """Aggregation temporality of metrics over OTLP. Set by its variable only."""
    metrics_histograms: Annotated[
        Literal["explicit_bucket_histogram", "base2_exponential_bucket_histogram"],
        env(_HISTOGRAMS, "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION"),
    ] = "explicit_bucket_histogram"
    """Aggregation of histograms over OTLP. Set by its variable only."""
    traces_exporter: Annotated[
        Literal["otlp", "console", "none"], env(_EXPORTERS, "OTEL_TRACES_EXPORTER", group=EXPORT)
    ] = "otlp"
    """Exporter of traces, in addition to the run file."""
    sampler: Annotated[str, env(checks.SAMPLER, "OTEL_TRACES_SAMPLER")] = checks.DEFAULT_SAMPLER
    """Head sampler of traces, by OpenTelemetry's names. Set by its variable only."""
    sampler_ratio: Annotated[float, env(checks.RATIO, "OTEL_TRACES_SAMPLER_ARG")] = 1.0
    """Share of traces that a `traceidratio` sampler keeps. Set by its variable only."""
    attribute_count_limit: Annotated[
        int, env(_LIMIT, "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "OTEL_ATTRIBUTE_COUNT_LIMIT")
    ] = 128
    """Most attributes of a span; further ones are dropped and counted. All limits are set by their variables only."""
    attribute_value_length_limit: Annotated[
        int | None, env(_LENGTH, "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT")
    ] = None
    """Most characters of a span's attribute; longer texts are cut. None: no limit."""
    event_value_length_limit: Annotated[int | None, env(_LENGTH, "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT")] = None
    """Most characters of an attribute of an event or a link; None: no limit."""
    event_count_limit: Annotated[int, env(_LIMIT, "OTEL_SPAN_EVENT_COUNT_LIMIT")] = 128
    """Most events of a span."""
    link_count_limit: Annotated[int, env(_LIMIT, "OTEL_SPAN_LINK_COUNT_LIMIT")] = 128
    """Most links of a span."""
    event_attribute_count_limit: Annotated[
        int, env(_LIMIT, "OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT", "OTEL_ATTRIBUTE_COUNT_LIMIT")
    ] = 128
    """Most attributes of an event."""
    link_attribute_count_limit: Annotated[
        int, env(_LIMIT, "OTEL_LINK_ATTRIBUTE_COUNT_LIMIT", "OTEL_ATTRIBUTE_COUNT_LIMIT")
    ] = 128
    """Most attributes of a link."""
    metrics_exporter: Annotated[tuple[str, ...], env(_METRICS, "OTEL_METRICS_EXPORTER", group=EXPORT)] = ("prometheus",)
    """Exporters of metrics; empty: none."""
    exemplar_filter: Annotated[
        Literal["trace_based", "always_on", "always_off"], env(_EXEMPLARS, "OTEL_METRICS_EXEMPLAR_FILTER")
    ] = "trace_based"
    """Whether histograms have exemplars, which name exported traces; `always_off`: none. Set by its variable only."""
    tracer_provider: Annotated[Any, env(_TRACER_PROVIDER, group=EXPORT)] = None
    """TracerProvider that spans are replayed through; None: the global one if set, else torchotel exports them."""
    meter_provider: Annotated[Any, env(_METER_PROVIDER, group=EXPORT)] = None
    """MeterProvider that gets the metrics as instruments, in addition to the exporters."""
    set_global_provider: Annotated[bool, env(checks.FLAG, "TORCHOTEL_SET_GLOBAL_PROVIDER", group=EXPORT)] = False
    """Whether a TracerProvider for the program's own spans is set if there is none."""
    prometheus_port: Annotated[int | None, env(_PORT, "OTEL_EXPORTER_PROMETHEUS_PORT", group=SCRAPING)] = 9464
    """Port of the scrape endpoint; the local rank is added. 0: any free port. None: no scrape endpoint."""
    prometheus_host: Annotated[str, env(checks.HOST, "OTEL_EXPORTER_PROMETHEUS_HOST", group=SCRAPING)] = "127.0.0.1"
    """Address that the scrape endpoint listens on."""
    prometheus_registry: Annotated[Any, env(_REGISTRY, group=SCRAPING)] = None
    """Registry that collects the metrics, without a scrape endpoint; None: torchotel starts the scrape endpoint."""
    discovery_dir: Annotated[Path | None, env(_FOLDER, "TORCHOTEL_DISCOVERY_DIR", group=SCRAPING)] = None
    """Folder of a Prometheus file_sd target for the scrape endpoint; None: the folder of the stack, if there is one."""
    record: Annotated[Path | None, env(_FOLDER, "TORCHOTEL_RECORD")] = None
    """Folder of the run file; if it has a run already, a free name beside it is used. None: no run file."""
    detail: Annotated[Detail, env(checks.DETAIL, "TORCHOTEL_DETAIL")] = "auto"
    """Steps with module spans: as many as the budget allows, all, every n-th, or none."""
    overhead_budget: Annotated[float, env(checks.BUDGET, "TORCHOTEL_OVERHEAD_BUDGET")] = 0.01
    """Share of step time that detail may cost with detail="auto"; the cost of steps without detail does not count."""
    include: Annotated[tuple[str, ...] | None, env(_PATTERNS, "TORCHOTEL_INCLUDE")] = None
    """Patterns of the module paths that get spans; None: all."""
    exclude: Annotated[tuple[str, ...] | None, env(_PATTERNS, "TORCHOTEL_EXCLUDE")] = None
    """Patterns of the module paths that get no spans; `exclude` wins over `include`."""
    max_depth: Annotated[int | None, env(_DEPTH, "TORCHOTEL_MAX_DEPTH")] = None
    """Deepest level of modules that get spans; the root has level 0. None: no limit."""
    max_spans: Annotated[int | None, env(_SPANS, "TORCHOTEL_MAX_SPANS")] = 2000
    """Most spans of a trace; beyond it, deeper modules fold into their parents. None: no limit."""
    module_histograms: Annotated[bool, env(checks.FLAG, "TORCHOTEL_MODULE_HISTOGRAMS")] = False
    """Whether `torch.module.duration` is exported, a histogram of 18 series for each module and direction."""
    gradient_norms: Annotated[GradientNormsSetting, env(checks.GRADIENT_NORMS, "TORCHOTEL_GRADIENT_NORMS")] = "auto"
    """Steps with gradient norms: detailed and, once in 64 steps, 8 after a non-finite loss; all; every n-th; none."""
    shapes: Annotated[bool, env(checks.FLAG, "TORCHOTEL_SHAPES")] = True
    """Whether shapes and dtypes of inputs and outputs are recorded."""
    exception_text: Annotated[
        Literal["type", "first_line", "full"], env(_EXCEPTION_TEXT, "TORCHOTEL_EXCEPTION_TEXT")
    ] = "first_line"
    """Part of an exception's text that is recorded: only the class, the first line, or the full text."""
    run_id: Annotated[str | None, env(_RUN_ID, "TORCHOTEL_RUN_ID")] = None
    """Id of the run, the same on all ranks; None: the launcher's job id, else an id the ranks agree on, else random."""
    worker: Annotated[Literal["auto", "process", "thread"], env(_WORKERS, "TORCHOTEL_WORKER")] = "auto"
    """Process or thread that builds and exports spans; auto: a companion process if possible, else a thread."""
    stall_timeout_s: Annotated[float, env(checks.SECONDS, "TORCHOTEL_STALL_TIMEOUT_S")] = 60.0
    """Shortest time in a phase without an event that counts as a stall; only with a companion process."""
    channel_bytes: Annotated[int, env(_CHANNEL, "TORCHOTEL_CHANNEL_BYTES")] = 16 * 1024 * 1024
    """Shared memory for records that wait for the companion process; a record that does not fit is dropped."""
    disabled: Annotated[bool, env(checks.OTEL_FLAG, "OTEL_SDK_DISABLED")] = False
    """Whether torchotel is off: no hook is installed, and nothing is exported."""

    def __post_init__(self) -> None:
        """Validate every value and bring it into normal form."""
        for signal in ("traces", "metrics"):
            name = f"{signal}_endpoint"
            if getattr(self, name) == "":
                base = self._setting("endpoint").validate("endpoint", self.endpoint)
                protocol = getattr(self, _PROTOCOLS_OF[name])
                object.__setattr__(self, name, signal_endpoint(base, signal, protocol))
        for name in SETTINGS:
            object.__setattr__(self, name, self._setting(name).validate(name, getattr(self, name)))
        for signal in ("", "metrics_"):
            key = getattr(self, f"{signal}client_key")
            if key is not None and getattr(self, f"{signal}client_certificate") is None:
                takes = f"None without {signal}client_certificate"
                raise ConfigError(f"{signal}client_key", key, takes)

    @classmethod
    def read(cls, explicit: Mapping[str, object], environ: Mapping[str, str]) -> "Config":
        """Read each setting that is not in `explicit`, or is UNSET there, from its variables.

        A bad value of an OTEL_* variable is ignored with a warning.

        Raises:
            ConfigError: An argument, or a variable of torchotel's own, has a bad value; the error names it.
        """
        values: dict[str, Any] = {name: value for name, value in explicit.items() if value is not UNSET}
        if "disabled" not in values and (
            SETTINGS["disabled"].read("disabled", environ) is True or config_file.disables(environ)
        ):
            # If torchotel is disabled, a bad value of any other variable must not raise.
            return cls(**values, disabled=True)
        # An argument wins over the variables of a single signal.
        if "endpoint" in values:
            values = {"traces_endpoint": "", "metrics_endpoint": "", **values}
        for name in ("protocol", "headers", "compression"):
            if name in values:
                values.setdefault(f"metrics_{name}", values[name])
        for name in SETTINGS:
            if name not in values and (value := _setting(name, values).read(name, environ)) is not UNSET:
                values[name] = value
        _add_default_endpoints(values)
        _drop_lone_keys(values, explicit)
        _warn_of_unknown(environ)
        return cls(**values)

    def otlp_endpoint(self, signal: Literal["traces", "metrics"]) -> OtlpEndpoint:
        """Return the OTLP endpoint of a signal."""
        prefix = "" if signal == "traces" else f"{signal}_"
        settings: dict[str, Any] = {
            name: getattr(self, prefix + name) for name in OtlpEndpoint._fields if name != "endpoint"
        }
        return OtlpEndpoint(getattr(self, f"{signal}_endpoint"), **settings)

    def _setting(self, name: str) -> Setting:
        return _setting(name, {protocol: getattr(self, protocol) for protocol in _PROTOCOLS_OF.values()})

    def public(self) -> dict[str, PlainValue]:
        """Return the settings that are not None as plain values, without credentials, for messages and `torch.run`."""
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
    """Return the declaration of a field; with gRPC an endpoint may be a target without a scheme."""
    grpc = values.get(_PROTOCOLS_OF.get(name, "")) == "grpc"
    return SETTINGS[name]._replace(kind=checks.TARGET) if grpc else SETTINGS[name]


def _add_default_endpoints(values: dict[str, Any]) -> None:
    """Set the endpoints that are not set to those of their protocols."""
    if "endpoint" in values:
        return
    values["endpoint"] = default_endpoint(values.get("protocol"))
    if values.get("metrics_protocol") != values.get("protocol"):
        base = default_endpoint(values.get("metrics_protocol"))
        values.setdefault("metrics_endpoint", signal_endpoint(base, "metrics", values.get("metrics_protocol")))


def _drop_lone_keys(values: dict[str, Any], explicit: Mapping[str, object]) -> None:
    """Ignore a client key from a variable if there is no client certificate."""
    for signal in ("", "metrics_"):
        key = f"{signal}client_key"
        if key not in explicit and values.get(key) is not None and values.get(f"{signal}client_certificate") is None:
            del values[key]
            warn_once("%s is ignored: there is no client certificate", " or ".join(SETTINGS[key].variables))


def _warn_of_unknown(environ: Mapping[str, str]) -> None:
    """Warn of variables with torchotel's prefix that no setting has."""
    known = {name for setting in SETTINGS.values() for name in setting.variables} | {BACKENDS_VARIABLE}
    for name in sorted(environ):
        if name.startswith("TORCHOTEL_") and name not in known:
            warn_once("%s is not known to torchotel and ignored. Run `torchotel doctor` to find similar names", name)
