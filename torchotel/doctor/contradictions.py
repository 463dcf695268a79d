"""Settings that can be read one by one, and do not go together."""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from torchotel._config import Config
from torchotel._receiver import is_loopback, without_credentials
from torchotel.doctor.finding import Finding, ok, warning
from torchotel.doctor.settings import variables_of

SUBJECT = "settings"
_GENERAL = "OTEL_EXPORTER_OTLP_"
_PORTS = {"http/protobuf": 4317, "grpc": 4318}
"""The port that mostly is the other protocol's."""
_EXPORTER = "Set OTEL_TRACES_EXPORTER to otlp, or unset it. For one run, use --traces-exporter otlp."


def check(config: Config, given: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[Finding]:
    """Tell what has no effect, and what leads elsewhere than it looks."""
    said = _said(given, environ)
    found = [
        *_of_traces(config, said),
        *_of_endpoints(config, said),
        *_of_signals(environ),
        *_of_metrics(config, said),
        *_of_detail(config, said),
    ]
    yield from (warning(SUBJECT, text, advice) for text, advice in found)
    if not found:
        yield ok(SUBJECT, "no settings contradict each other")


def _said(given: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Name each field that was said, by its flag or by its variable."""
    said = {}
    for field, variables in variables_of().items():
        present = [name for name in variables if environ.get(name, "").strip()]
        if field in given:
            said[field] = f"--{field.replace('_', '-')}"
        elif present:
            said[field] = present[0]
    return said


def _of_traces(config: Config, said: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    exporter = config.traces_exporter
    for field in ("traces_endpoint", "endpoint"):
        if exporter != "otlp" and field in said and "otlp" not in config.metrics_exporter:
            text = f"{said[field]} names an endpoint, but traces_exporter is {exporter}: nothing is sent there"
            yield text, _EXPORTER
            break
    if exporter == "none" and config.set_global_provider:
        yield "set_global_provider has no effect while traces_exporter is none", _EXPORTER
    if config.sampler.endswith("always_off") or (config.sampler.endswith("ratio") and config.sampler_ratio == 0):
        but = "" if config.sampler.endswith("always_off") else ", except those of slow, failed and NaN steps"
        text = f"OTEL_TRACES_SAMPLER is {config.sampler}: no trace is sent{but}"
        yield text, "Unset it, or use traceidratio with OTEL_TRACES_SAMPLER_ARG from 0 to 1."
    elif "sampler_ratio" in said and not config.sampler.endswith("ratio"):
        text = f"OTEL_TRACES_SAMPLER_ARG has no effect with the sampler {config.sampler}"
        yield text, "Set OTEL_TRACES_SAMPLER to traceidratio or parentbased_traceidratio."


def _of_endpoints(config: Config, said: Mapping[str, str]) -> Iterator[tuple[str, str]]:
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
            files := [name for name in ("certificate", "client_certificate") if name in said]
        ):
            text = f"{' and '.join(said[name] for name in files)} has no effect: the endpoint is http://, without TLS"
            yield text, "Use https:// in the endpoint."
    elsewhere = "traces_endpoint" in said and not said.keys() & {"endpoint", "metrics_endpoint"}
    if elsewhere and "otlp" in config.metrics_exporter:
        to = without_credentials(config.metrics_endpoint)
        text = f"{said['traces_endpoint']} applies to traces only; metrics are sent to {to}"
        yield text, "Set OTEL_EXPORTER_OTLP_ENDPOINT, a base URL, for both."


def _of_signals(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name in sorted(environ):
        for signal in ("TRACES_", "METRICS_"):
            general = name.replace(f"{_GENERAL}{signal}", _GENERAL)
            own, other = environ[name].strip(), environ.get(general, "").strip()
            if general == name or not own or not other or own == other:
                continue
            if name.endswith("_ENDPOINT") and own.startswith(other):
                continue
            yield f"{name} overrides {general}, which has another value", "Unset the one that is wrong."


def _of_metrics(config: Config, said: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    ways = config.metrics_exporter
    shown = ",".join(ways) or "none"
    for field in ("prometheus_port", "prometheus_host", "discovery_dir"):
        if field in said and "prometheus" not in ways:
            text = f"{said[field]} has no effect: metrics_exporter is {shown}"
            yield text, "Set OTEL_METRICS_EXPORTER to prometheus, or to prometheus,otlp."
        elif field in said and config.prometheus_port is None and field != "prometheus_port":
            yield f"{said[field]} has no effect: prometheus_port is none", "Set a port."
    for field in ("metrics_endpoint", "metrics_interval_s"):
        if field in said and "otlp" not in ways:
            text = f"{said[field]} has no effect: metrics_exporter is {shown}"
            yield text, "Set OTEL_METRICS_EXPORTER to otlp, or to prometheus,otlp."


def _of_detail(config: Config, said: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    if config.detail != "off":
        return
    advice = "Do not set detail=off (TORCHOTEL_DETAIL): modules are recorded on detailed steps only."
    for field in ("include", "exclude", "max_depth", "module_histograms", "shapes"):
        if field in said:
            yield f"{said[field]} has no effect: with detail=off no module is recorded", advice
    if config.gradient_norms == "auto":
        text = "with detail=off no gradient norms are read: by default they are read on detailed steps only"
        yield (
            text,
            "Set gradient_norms (TORCHOTEL_GRADIENT_NORMS) to true, to a number, or to false if none are wanted.",
        )
