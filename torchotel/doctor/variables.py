"""Variables whose names are near those that are known, and so perhaps misspelt."""

from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches

from opentelemetry import environment_variables as api
from opentelemetry.sdk import environment_variables as sdk

from torchotel.doctor.finding import Finding, ok, warning
from torchotel.doctor.settings import known_variables

SUBJECT = "variables"
_OURS = "TORCHOTEL_"
_PREFIXES = ("OTEL_", "OTLP_", "OPENTELEMETRY_", "TORCHOTEL", "TORCH_OTEL", "PROMETHEUS_")
_NEAR, _VERY_NEAR = 0.8, 0.9
"""Similarity from which a name is taken for another, with such a prefix and without."""
_OTHERS = ("OTEL_PYTHON_", "OTEL_INSTRUMENTATION_", "OTEL_RESOURCE_PROVIDERS_")
"""Beginnings of names that instrumentations make up for themselves."""


def check(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Compare with the names that torchotel and OpenTelemetry know."""
    known = known_variables() | _opentelemetry()
    found = 0
    for name in sorted(environ):
        if name in known or name.startswith(_OTHERS):
            continue
        near = _nearest(name, known)
        if near is not None:
            found += 1
            yield warning(SUBJECT, f"{name} is known to nobody", f"Did you mean {near}?")
        elif name.startswith(_OURS):
            found += 1
            ours = ", ".join(sorted(other for other in known if other.startswith(_OURS)))
            yield warning(SUBJECT, f"{name} is not known to torchotel", f"It knows {ours}.")
    if not found:
        used = sum(name in known for name in environ)
        yield ok(SUBJECT, f"no name looks misspelt; {used} of OTEL_* and TORCHOTEL_* are set")


def _nearest(name: str, known: Collection[str]) -> str | None:
    upper = name.upper().replace("-", "_")
    if upper in known:
        return upper
    near = get_close_matches(upper, known, 1, _NEAR if upper.startswith(_PREFIXES) else _VERY_NEAR)
    return near[0] if near else None


def _opentelemetry() -> set[str]:
    """List the names that OpenTelemetry for Python knows."""
    return {name for module in (api, sdk) for name in vars(module) if name.startswith("OTEL_")}
