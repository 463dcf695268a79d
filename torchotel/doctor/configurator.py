"""What `opentelemetry-instrument` does before it comes to torchotel: OpenTelemetry's distro sets up the SDK."""

from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points

from torchotel.doctor.finding import Finding, warning

SUBJECT = "settings"
_EXPORTERS = {
    "OTEL_TRACES_EXPORTER": "opentelemetry_traces_exporter",
    "OTEL_METRICS_EXPORTER": "opentelemetry_metrics_exporter",
}


def check(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Look for each exporter that the SDK would raise for, which ends all instrumentation."""
    if not entry_points(group="opentelemetry_configurator"):
        return
    for name, group in _EXPORTERS.items():
        words = {word.strip() for word in environ.get(name, "").split(",")} - {"", "none"}
        for word in sorted(words - entry_points(group=group).names):
            text = f"opentelemetry-instrument would find no exporter for {name}={word} and instrument nothing"
            advice = f"Unset {name}, whose default is otlp, or install opentelemetry-exporter-{word}."
            yield warning(SUBJECT, text, advice)
