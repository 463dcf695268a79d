"""All settings in one frozen value; the only place that reads the environment for them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias, cast
from urllib.parse import urlsplit, urlunsplit

from torchotel import _checks as checks
from torchotel._errors import ConfigError
from torchotel._kinds import choice, choices, having, integer, optional
from torchotel._settings import UNSET, Setting, env, otlp

Detail: TypeAlias = Literal["auto", "all", "off"] | int
PlainValue: TypeAlias = str | bool | int | float | tuple[str, ...]

GradientNormsSetting: TypeAlias = Literal["auto"] | bool | int

_HIDDEN = frozenset({"headers", "metrics_headers", "client_certificate", "client_key"})
_GIVEN = frozenset({"tracer_provider", "meter_provider", "prometheus_registry"})
"""Objects of the user's, of which no more than their class is shown."""
_SIGNALS = ("traces", "metrics")


_EXPORTERS: Final = choice("otlp", "none", later="console")
_PROTOCOLS: Final = choice("http/protobuf", later="grpc")
_COMPRESSIONS: Final = choice("gzip", "none")
_DEPTH: Final = optional(integer(0), word="none")
_SPANS: Final = optional(integer(10), word="none")
_RUN_ID: Final = optional(checks.TEXT, word="none")
_TEXT: Final = optional(checks.TEXT)
_FOLDER: Final = optional(checks.FOLDER)
_FILE: Final = optional(checks.FILE)
_METRICS: Final = choices("prometheus", "otlp")
_PORT: Final = optional(integer(0, checks.LAST_PORT), word="none")
_TRACER_PROVIDER: Final = optional(having("get_tracer"))
_METER_PROVIDER: Final = optional(having("get_meter"))
_REGISTRY: Final = optional(having("register", "unregister"))
_PATTERNS: Final = optional(checks.PATTERNS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What `instrument()` was told; every value is checked, and in its one form, once this exists."""

    service_name: Annotated[str | None, env(_TEXT, "OTEL_SERVICE_NAME")] = None
    """`service.name`; None: the script's name."""
    endpoint: Annotated[str, env(checks.BASE_URL, "OTEL_EXPORTER_OTLP_ENDPOINT")] = "http://localhost:4318"
    """Base URL of an OTLP receiver; the signal's path is added."""
    traces_endpoint: Annotated[str, env(checks.URL, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")] = ""
    """Full URL that traces are posted to; left out: `endpoint` with `/v1/traces`. By its variable only."""
    metrics_endpoint: Annotated[str, env(checks.URL, "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")] = ""
    """Full URL that metrics are posted to; left out: `endpoint` with `/v1/metrics`. By its variable only."""
    protocol: Annotated[Literal["http/protobuf"], otlp(_PROTOCOLS, "PROTOCOL")] = "http/protobuf"
    """How traces travel."""
    headers: Annotated[Mapping[str, str], otlp(checks.HEADERS, "HEADERS", merged=True)] = field(
        default_factory=dict, repr=False
    )
    """Headers of each request. They carry credentials, so they are never shown."""
    compression: Annotated[Literal["gzip", "none"], otlp(_COMPRESSIONS, "COMPRESSION")] = "gzip"
    """Of request bodies."""
    metrics_headers: Annotated[Mapping[str, str], otlp(checks.HEADERS, "HEADERS", signal="METRICS", merged=True)] = (
        field(default_factory=dict, repr=False)
    )
    """Headers of each request with metrics: the argument `headers`, or their own variables."""
    metrics_compression: Annotated[Literal["gzip", "none"], otlp(_COMPRESSIONS, "COMPRESSION", signal="METRICS")] = (
        "gzip"
    )
    """Of request bodies with metrics: the argument `compression`, or its own variables."""
    metrics_interval_s: Annotated[float, env(checks.MILLISECONDS, "OTEL_METRIC_EXPORT_INTERVAL")] = 60.0
    """Time between two pushes of metrics. By its variable only, which has milliseconds."""
    timeout_s: Annotated[float, otlp(checks.SECONDS, "TIMEOUT")] = 10.0
    """Longest wait for an answer to one request."""
    certificate: Annotated[str | None, otlp(_FILE, "CERTIFICATE")] = None
    """PEM file of the authorities that may sign the server's certificate; None: the usual ones."""
    client_certificate: Annotated[str | None, otlp(_FILE, "CLIENT_CERTIFICATE")] = None
    """PEM file that says who this client is, for mutual TLS."""
    client_key: Annotated[str | None, otlp(_FILE, "CLIENT_KEY")] = field(default=None, repr=False)
    """PEM file of the client certificate's private key; None: it is in the certificate's file."""
    traces_exporter: Annotated[Literal["otlp", "none"], env(_EXPORTERS, "OTEL_TRACES_EXPORTER")] = "otlp"
    """Where traces go, besides the run file."""
    sampler: Annotated[str, env(checks.SAMPLER, "OTEL_TRACES_SAMPLER")] = checks.DEFAULT_SAMPLER
    """Which traces are sent, by OpenTelemetry's names of samplers. By its variable only."""
    sampler_ratio: Annotated[float, env(checks.RATIO, "OTEL_TRACES_SAMPLER_ARG")] = 1.0
    """Share of traces that a `traceidratio` sampler keeps. By its variable only."""
    metrics_exporter: Annotated[tuple[str, ...], env(_METRICS, "OTEL_METRICS_EXPORTER")] = ("prometheus",)
    """Ways out of metrics; empty: none."""
    tracer_provider: Annotated[Any, env(_TRACER_PROVIDER)] = field(default=None, repr=False)
    """Spans are replayed through it; None: through the global one where there is one, else sent by ourselves."""
    meter_provider: Annotated[Any, env(_METER_PROVIDER)] = field(default=None, repr=False)
    """Metrics are instruments of it too; None: of none of the user's."""
    set_global_provider: Annotated[bool, env(checks.FLAG, "TORCHOTEL_SET_GLOBAL_PROVIDER")] = False
    """Whether a TracerProvider is set for the user's own spans where there is none."""
    prometheus_port: Annotated[int | None, env(_PORT, "OTEL_EXPORTER_PROMETHEUS_PORT")] = 9464
    """Port of the first local rank's scrape endpoint, the next rank's is one higher; 0: any free one, None: none."""
    prometheus_host: Annotated[str, env(checks.TEXT, "OTEL_EXPORTER_PROMETHEUS_HOST")] = "127.0.0.1"
    """Address that the scrape endpoint listens on."""
    prometheus_registry: Annotated[Any, env(_REGISTRY)] = field(default=None, repr=False)
    """Metrics are collected there and no server is started; None: a registry and a server of our own."""
    discovery_dir: Annotated[Path | None, env(_FOLDER, "TORCHOTEL_DISCOVERY_DIR")] = None
    """Folder of a file that names the scrape endpoint to Prometheus's file_sd; None: no file."""
    record: Annotated[Path | None, env(_FOLDER, "TORCHOTEL_RECORD")] = None
    """Folder of the run file; None: no run file."""
    detail: Annotated[Detail, env(checks.DETAIL, "TORCHOTEL_DETAIL")] = "auto"
    """Steps that get module spans: within the budget, every one, every n-th, or none."""
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
    """Steps whose gradients are looked at: the detailed ones, every one, every n-th, or none."""
    shapes: Annotated[bool, env(checks.FLAG, "TORCHOTEL_SHAPES")] = True
    """Whether shapes of inputs and outputs are recorded."""
    run_id: Annotated[str | None, env(_RUN_ID, "TORCHOTEL_RUN_ID")] = None
    """The run, the same on all its ranks; None: the launcher's job id, else random."""
    disabled: Annotated[bool, env(checks.OTEL_FLAG, "OTEL_SDK_DISABLED")] = False
    """No hook is installed and nothing is exported."""

    def __post_init__(self) -> None:
        """Check every value and bring it into its one form."""
        for signal in _SIGNALS:
            if getattr(self, f"{signal}_endpoint") == "":
                base = _SETTINGS["endpoint"].checked("endpoint", self.endpoint)
                object.__setattr__(self, f"{signal}_endpoint", f"{base.rstrip('/')}/v1/{signal}")
        for name, setting in _SETTINGS.items():
            object.__setattr__(self, name, setting.checked(name, getattr(self, name)))
        if self.client_key is not None and self.client_certificate is None:
            takes = "None where there is no client_certificate"
            raise ConfigError("client_key", self.client_key, takes)

    @classmethod
    def read(cls, given: Mapping[str, object], environ: Mapping[str, str]) -> "Config":
        """Read each argument that is not in `given`, or is UNSET there, from its variable.

        Raises:
            ConfigError: a value is bad; it names the variable where the value came from one.
        """
        values: dict[str, Any] = {name: value for name, value in given.items() if value is not UNSET}
        if "disabled" not in values and _SETTINGS["disabled"].read("disabled", environ) is True:
            # What is off must not fail on a variable that was meant for another program.
            return cls(**values, disabled=True)
        # Said in the program, so it beats the variables of the same thing for one signal.
        if "endpoint" in values:
            values = {"traces_endpoint": "", "metrics_endpoint": "", **values}
        for name in ("headers", "compression"):
            if name in values:
                values.setdefault(f"metrics_{name}", values[name])
        for name, setting in _SETTINGS.items():
            if name not in values and (value := setting.read(name, environ)) is not UNSET:
                values[name] = value
        return cls(**values)

    def public(self) -> dict[str, PlainValue]:
        """Give what may be shown and sent: set fields as plain values, without credentials."""
        shown: dict[str, PlainValue] = {}
        for setting in fields(self):
            value = getattr(self, setting.name)
            if value is None or setting.name in _HIDDEN:
                continue
            if setting.name.endswith("endpoint"):
                value = _without_user(value)
            if setting.name in _GIVEN:
                value = type(value).__qualname__
            shown[setting.name] = str(value) if isinstance(value, Path) else value
        return shown


# Annotations are evaluated in this file, so a field's type is the Annotated form itself.
_SETTINGS: Final[Mapping[str, Setting]] = {
    setting.name: cast("Any", setting.type).__metadata__[0] for setting in fields(Config)
}


def own_folder(record: Path, environ: Mapping[str, str]) -> Path:
    """Give this rank's folder of a run file: with several ranks each has one of its own."""
    if environ.get("WORLD_SIZE", "1") == "1":
        return record
    return record.with_name(f"{record.name}-rank{environ.get('RANK', '0')}")


def own_port(port: int, environ: Mapping[str, str]) -> int:
    """Give this rank's port: those of a host's ranks follow each other, and 0 stays any free one."""
    rank = environ.get("LOCAL_RANK", "0")
    own = port + int(rank) if port and rank.isdecimal() else port
    return own if own <= checks.LAST_PORT else 0


def _without_user(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
