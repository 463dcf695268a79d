"""All settings in one frozen value; the only place that reads the environment for them."""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias, cast
from urllib.parse import urlsplit, urlunsplit

from torchotel import _checks as checks
from torchotel._errors import ConfigError

Detail: TypeAlias = Literal["auto", "all", "off"] | int
PlainValue: TypeAlias = str | bool | int | float | tuple[str, ...]

_HIDDEN = frozenset({"headers", "client_certificate", "client_key"})


class Unset(enum.Enum):
    """The type of UNSET."""

    UNSET = "unset"

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset.UNSET
"""Stands for an argument that was left out: its variable is read, and only then comes the default."""


class _Setting(NamedTuple):
    """How a field is read and checked."""

    kind: checks.Kind
    variables: tuple[str, ...]
    """The first one that is set wins."""
    merged: bool = False
    """Or all that are set join."""


def _env(kind: checks.Kind, *variables: str) -> _Setting:
    return _Setting(kind, variables)


def _otlp(kind: checks.Kind, name: str, *, merged: bool = False) -> _Setting:
    """Read the variable for traces, else the general one."""
    variables = (f"OTEL_EXPORTER_OTLP_TRACES_{name}", f"OTEL_EXPORTER_OTLP_{name}")
    return _Setting(kind, variables, merged)


_EXPORTERS: Final = checks.choice("otlp", "none", later="console")
_PROTOCOLS: Final = checks.choice("http/protobuf", later="grpc")
_COMPRESSIONS: Final = checks.choice("gzip", "none")
_DEPTH: Final = checks.optional(checks.integer(0), word="none")
_SPANS: Final = checks.optional(checks.integer(10), word="none")
_RUN_ID: Final = checks.optional(checks.TEXT, word="none")
_TEXT: Final = checks.optional(checks.TEXT)
_FOLDER: Final = checks.optional(checks.FOLDER)
_FILE: Final = checks.optional(checks.FILE)
_PATTERNS: Final = checks.optional(checks.PATTERNS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What `instrument()` was told; every value is checked, and in its one form, once this exists."""

    service_name: Annotated[str | None, _env(_TEXT, "OTEL_SERVICE_NAME")] = None
    """`service.name`; None: the script's name."""
    endpoint: Annotated[str, _env(checks.BASE_URL, "OTEL_EXPORTER_OTLP_ENDPOINT")] = "http://localhost:4318"
    """Base URL of an OTLP receiver; the signal's path is added."""
    traces_endpoint: Annotated[str, _env(checks.URL, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")] = ""
    """Full URL that traces are posted to; left out: `endpoint` with `/v1/traces`. By its variable only."""
    protocol: Annotated[Literal["http/protobuf"], _otlp(_PROTOCOLS, "PROTOCOL")] = "http/protobuf"
    """How traces travel."""
    headers: Annotated[Mapping[str, str], _otlp(checks.HEADERS, "HEADERS", merged=True)] = field(
        default_factory=dict, repr=False
    )
    """Headers of each request. They carry credentials, so they are never shown."""
    compression: Annotated[Literal["gzip", "none"], _otlp(_COMPRESSIONS, "COMPRESSION")] = "gzip"
    """Of request bodies."""
    timeout_s: Annotated[float, _otlp(checks.SECONDS, "TIMEOUT")] = 10.0
    """Longest wait for an answer to one request."""
    certificate: Annotated[str | None, _otlp(_FILE, "CERTIFICATE")] = None
    """PEM file of the authorities that may sign the server's certificate; None: the usual ones."""
    client_certificate: Annotated[str | None, _otlp(_FILE, "CLIENT_CERTIFICATE")] = None
    """PEM file that says who this client is, for mutual TLS."""
    client_key: Annotated[str | None, _otlp(_FILE, "CLIENT_KEY")] = field(default=None, repr=False)
    """PEM file of the client certificate's private key; None: it is in the certificate's file."""
    traces_exporter: Annotated[Literal["otlp", "none"], _env(_EXPORTERS, "OTEL_TRACES_EXPORTER")] = "otlp"
    """Where traces go, besides the run file."""
    record: Annotated[Path | None, _env(_FOLDER, "TORCHOTEL_RECORD")] = None
    """Folder of the run file; None: no run file."""
    detail: Annotated[Detail, _env(checks.DETAIL, "TORCHOTEL_DETAIL")] = "auto"
    """Steps that get module spans: within the budget, every one, every n-th, or none."""
    include: Annotated[tuple[str, ...] | None, _env(_PATTERNS, "TORCHOTEL_INCLUDE")] = None
    """Patterns of the module paths that get spans; None: all."""
    exclude: Annotated[tuple[str, ...] | None, _env(_PATTERNS, "TORCHOTEL_EXCLUDE")] = None
    """Patterns of the module paths that get none; it beats `include`."""
    max_depth: Annotated[int | None, _env(_DEPTH, "TORCHOTEL_MAX_DEPTH")] = None
    """Deepest level of modules that get spans; the root is 0, None: no limit."""
    max_spans: Annotated[int | None, _env(_SPANS, "TORCHOTEL_MAX_SPANS")] = 2000
    """Spans of one trace, beyond which deeper modules fold into their parents; None: no limit."""
    shapes: Annotated[bool, _env(checks.FLAG, "TORCHOTEL_SHAPES")] = True
    """Whether shapes of inputs and outputs are recorded."""
    run_id: Annotated[str | None, _env(_RUN_ID, "TORCHOTEL_RUN_ID")] = None
    """The run, the same on all its ranks; None: the launcher's job id, else random."""
    disabled: Annotated[bool, _env(checks.OTEL_FLAG, "OTEL_SDK_DISABLED")] = False
    """No hook is installed and nothing is exported."""

    def __post_init__(self) -> None:
        """Check every value and bring it into its one form."""
        if self.traces_endpoint == "":
            base = _checked("endpoint", self.endpoint)
            object.__setattr__(self, "traces_endpoint", f"{base.rstrip('/')}/v1/traces")
        for setting in fields(self):
            object.__setattr__(self, setting.name, _checked(setting.name, getattr(self, setting.name)))
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
        left_out = [setting.name for setting in fields(cls) if setting.name not in values]
        if _from_environment(["disabled"], environ).get("disabled") and "disabled" in left_out:
            # What is off must not fail on a variable that was meant for another program.
            return cls(**values, disabled=True)
        if "endpoint" in values and "traces_endpoint" in left_out:
            # Said in the program, so it beats the variable of the same thing.
            left_out.remove("traces_endpoint")
        return cls(**values, **_from_environment(left_out, environ))

    def public(self) -> dict[str, PlainValue]:
        """Give what may be shown and sent: set fields as plain values, without credentials."""
        shown: dict[str, PlainValue] = {}
        for setting in fields(self):
            value = getattr(self, setting.name)
            if value is None or setting.name in _HIDDEN:
                continue
            if setting.name.endswith("endpoint"):
                value = _without_user(value)
            shown[setting.name] = str(value) if isinstance(value, Path) else value
        return shown


# Annotations are evaluated in this file, so a field's type is the Annotated form itself.
_SETTINGS: Final[Mapping[str, _Setting]] = {
    setting.name: cast("Any", setting.type).__metadata__[0] for setting in fields(Config)
}


def own_folder(record: Path, environ: Mapping[str, str]) -> Path:
    """Give this rank's folder of a run file: with several ranks each has one of its own."""
    if environ.get("WORLD_SIZE", "1") == "1":
        return record
    return record.with_name(f"{record.name}-rank{environ.get('RANK', '0')}")


def _checked(name: str, value: object) -> Any:
    kind = _SETTINGS[name].kind
    try:
        return kind.check(value)
    except (ValueError, TypeError):
        raise ConfigError(name, kind.show(value), kind.takes) from None


def _parsed(name: str, text: str, source: str) -> Any:
    kind = _SETTINGS[name].kind
    try:
        return kind.check(kind.parse(text))
    except (ValueError, TypeError):
        raise ConfigError(name, kind.show(text), kind.takes, source) from None


def _from_environment(names: Iterable[str], environ: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for name in names:
        setting = _SETTINGS[name]
        # OpenTelemetry: an empty variable is one that is not set.
        present = [variable for variable in setting.variables if environ.get(variable, "").strip()]
        if not present:
            continue
        if setting.merged:
            # Later pairs win, so the most particular variable comes last.
            text, source = ",".join(environ[variable] for variable in present[::-1]), " and ".join(present)
        else:
            text, source = environ[present[0]].strip(), present[0]
        values[name] = _parsed(name, text, source)
    return values


def _without_user(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
