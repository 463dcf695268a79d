"""Check the settings: variables that cannot be read, warnings, and contradictions."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from torchotel._types import ConfigError
from torchotel.config import config_file
from torchotel.config.config import SETTINGS, Config
from torchotel.config.otlp_endpoint import is_loopback, without_credentials
from torchotel.doctor.result import Finding, failed, ok, warning

SUBJECT = "settings"
PREFIX = "TORCHOTEL_"
_DISABLED = "OTEL_SDK_DISABLED"


class Read(NamedTuple):
    """Settings without unreadable variables, and findings on those."""

    config: Config
    findings: list[Finding]


def read(explicit: Mapping[str, Any], environ: Mapping[str, str]) -> Read:
    """Read the settings as `instrument()` does, but report unreadable variables instead of raising.

    Raises:
        ConfigError: A setting from the command line is invalid.
    """
    findings: list[Finding] = []
    # Unknown variables of torchotel are reported by `otel_environment`.
    known_names = known_variables()
    messages: list[str] = []  # of all attempts, since each warning is logged once
    with _warnings(messages):
        disabling = _disabling(environ)
    readable = {
        name: value
        for name, value in environ.items()
        if name not in disabling and (name in known_names or not name.startswith(PREFIX))
    }
    for name, reason in disabling.items():
        advice = f"Unset {name}. The other checks ignore it."
        findings.append(
            warning(SUBJECT, f"{name} {reason}: nothing is recorded, and instrument() does nothing", advice)
        )
    while True:
        with _warnings(messages):
            try:
                config = Config.read(explicit, readable)
            except ConfigError as error:
                invalid = [name for name in variables_of()[error.field] if name in readable]
                if error.field in explicit or not invalid:
                    raise
                advice = f"instrument() raises ConfigError for it. Correct or unset {' and '.join(invalid)}."
                findings.append(failed(SUBJECT, str(error), advice))
                for name in invalid:
                    del readable[name]
                continue
        break
    findings += (warning(SUBJECT, text, "Correct the variable, or unset it.") for text in dict.fromkeys(messages))
    return Read(config, findings or [ok(SUBJECT, "all settings are valid")])


def _disabling(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that disable torchotel, each with its value in words."""
    found = {_DISABLED: "is true"} if environ.get(_DISABLED, "").strip().lower() == "true" else {}
    if config_file.disables(environ):
        found |= {name: "names a file with `disabled: true`" for name in config_file.VARIABLES if environ.get(name)}
    return found


def variables_of() -> dict[str, tuple[str, ...]]:
    """Return the variables of each setting."""
    return {name: setting.variables for name, setting in SETTINGS.items()}


def known_variables() -> set[str]:
    """Return the names of all variables with settings."""
    return {name for names in variables_of().values() for name in names}


@contextmanager
def _warnings(messages: list[str]) -> Iterator[None]:
    """Collect the warnings that torchotel logs."""
    logger, handler = logging.getLogger("torchotel"), logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]  # less than a class
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


_GENERAL = "OTEL_EXPORTER_OTLP_"
_PORTS = {"http/protobuf": 4317, "grpc": 4318}
"""The port that the other protocol uses by default."""
_EXPORTER = "Set OTEL_TRACES_EXPORTER to otlp, or unset it. For one run, use --traces-exporter otlp."


def check_contradictions(config: Config, explicit: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[Finding]:
    """Report settings without an effect, and endpoints that do not match other settings."""
    sources = _sources(explicit, environ)
    found = [
        *_check_traces(config, sources),
        *_check_endpoints(config, sources),
        *_check_signals(environ),
        *_check_metrics(config, sources),
        *_check_detail(config, sources),
    ]
    yield from (warning(SUBJECT, text, advice) for text, advice in found)
    if not found:
        yield ok(SUBJECT, "no settings contradict each other")


def _sources(explicit: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the source of each explicit setting: its flag or its variable."""
    sources = {}
    for field, variables in variables_of().items():
        present = [name for name in variables if environ.get(name, "").strip()]
        if field in explicit:
            sources[field] = f"--{field.replace('_', '-')}"
        elif present:
            sources[field] = present[0]
    return sources


def _check_traces(config: Config, sources: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    exporter = config.traces_exporter
    for field in ("traces_endpoint", "endpoint"):
        if exporter != "otlp" and field in sources and "otlp" not in config.metrics_exporter:
            text = f"{sources[field]} names an endpoint, but traces_exporter is {exporter}: nothing is sent there"
            yield text, _EXPORTER
            break
    if exporter == "none" and config.set_global_provider:
        yield "set_global_provider has no effect while traces_exporter is none", _EXPORTER
    if config.sampler.endswith("always_off") or (config.sampler.endswith("ratio") and config.sampler_ratio == 0):
        exception = "" if config.sampler.endswith("always_off") else ", except those of slow, failed and NaN steps"
        text = f"OTEL_TRACES_SAMPLER is {config.sampler}: no trace is sent{exception}"
        yield text, "Unset it, or use traceidratio with OTEL_TRACES_SAMPLER_ARG from 0 to 1."
    elif "sampler_ratio" in sources and not config.sampler.endswith("ratio"):
        text = f"OTEL_TRACES_SAMPLER_ARG has no effect with the sampler {config.sampler}"
        yield text, "Set OTEL_TRACES_SAMPLER to traceidratio or parentbased_traceidratio."


def _check_endpoints(config: Config, sources: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    parts = urlsplit(config.traces_endpoint)
    if config.traces_exporter == "otlp" and parts.scheme in {"http", "https"}:
        if parts.port == _PORTS[config.protocol]:
            other = "grpc" if config.protocol == "http/protobuf" else "http/protobuf"
            text = f"port {parts.port} is usually that of {other}, but protocol is {config.protocol}"
            yield text, f"Set OTEL_EXPORTER_OTLP_PROTOCOL to {other}, or the endpoint to port {_PORTS[other]}."
        if config.protocol == "grpc" and "/v1/" in parts.path:
            yield "the path of the endpoint has no effect with gRPC", "Set the endpoint to scheme, host and port only."
        if parts.scheme == "http" and config.headers and not is_loopback(parts.hostname or ""):
            names = ", ".join(config.headers)
            text = f"headers ({names}) are sent to {parts.hostname} unencrypted"
            yield text, "Use https:// in the endpoint if they hold credentials."
        if parts.scheme == "http" and (
            files := [name for name in ("certificate", "client_certificate") if name in sources]
        ):
            names = " and ".join(sources[name] for name in files)
            text = f"{names} has no effect: the endpoint is http://, without TLS"
            yield text, "Use https:// in the endpoint."
    is_separate = "traces_endpoint" in sources and not sources.keys() & {"endpoint", "metrics_endpoint"}
    if is_separate and "otlp" in config.metrics_exporter:
        to = without_credentials(config.metrics_endpoint)
        text = f"{sources['traces_endpoint']} applies to traces only; metrics are sent to {to}"
        yield text, "Set OTEL_EXPORTER_OTLP_ENDPOINT, a base URL, for both."


def _check_signals(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name in sorted(environ):
        for signal in ("TRACES_", "METRICS_"):
            general = name.replace(f"{_GENERAL}{signal}", _GENERAL)
            own, other = environ[name].strip(), environ.get(general, "").strip()
            if general == name or not own or not other or own == other:
                continue
            if name.endswith("_ENDPOINT") and own.startswith(other):
                continue
            yield f"{name} overrides {general}, which has another value", "Unset the one that is wrong."


def _check_metrics(config: Config, sources: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    exporters = config.metrics_exporter
    shown = ",".join(exporters) or "none"
    for field in ("prometheus_port", "prometheus_host", "discovery_dir"):
        if field in sources and "prometheus" not in exporters:
            text = f"{sources[field]} has no effect: metrics_exporter is {shown}"
            yield text, "Set OTEL_METRICS_EXPORTER to prometheus, or to prometheus,otlp."
        elif field in sources and config.prometheus_port is None and field != "prometheus_port":
            yield f"{sources[field]} has no effect: prometheus_port is none", "Set a port."
    for field in ("metrics_endpoint", "metrics_interval_s"):
        if field in sources and "otlp" not in exporters:
            text = f"{sources[field]} has no effect: metrics_exporter is {shown}"
            yield text, "Set OTEL_METRICS_EXPORTER to otlp, or to prometheus,otlp."


def _check_detail(config: Config, sources: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    if config.detail != "off":
        return
    advice = "Do not set detail=off (TORCHOTEL_DETAIL): modules are recorded on detailed steps only."
    for field in ("include", "exclude", "max_depth", "module_histograms", "shapes"):
        if field in sources:
            yield f"{sources[field]} has no effect: with detail=off no module is recorded", advice
    if config.gradient_norms == "auto":
        text = "with detail=off no gradient norms are read: by default they are read on detailed steps only"
        yield (
            text,
            "Set gradient_norms (TORCHOTEL_GRADIENT_NORMS) to true, to a number, or to false if none are wanted.",
        )


_EXPORTERS = {
    "OTEL_TRACES_EXPORTER": "opentelemetry_traces_exporter",
    "OTEL_METRICS_EXPORTER": "opentelemetry_metrics_exporter",
}


def check_sdk_exporters(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Report exporters that the SDK cannot find; opentelemetry-instrument then instruments nothing."""
    if not entry_points(group="opentelemetry_configurator"):
        return
    for name, group in _EXPORTERS.items():
        words = {word.strip() for word in environ.get(name, "").split(",")} - {"", "none"}
        for word in sorted(words - entry_points(group=group).names):
            text = f"opentelemetry-instrument would find no exporter for {name}={word} and instrument nothing"
            advice = f"Unset {name}, whose default is otlp, or install opentelemetry-exporter-{word}."
            yield warning(SUBJECT, text, advice)
