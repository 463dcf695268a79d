"""Check the OpenTelemetry variables of this environment, and its TracerProvider."""

from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches

from opentelemetry import environment_variables as api
from opentelemetry.sdk import environment_variables as sdk

from torchotel.config.config import BACKENDS_VARIABLE, Config
from torchotel.config.otel_variables import VARIABLES
from torchotel.doctor.result import Finding, ok, warning
from torchotel.doctor.settings import PREFIX, known_variables
from torchotel.exporters.sdk.global_provider import find_provider

_VARIABLES = "variables"
_PREFIXES = ("OTEL_", "OTLP_", "OPENTELEMETRY_", "TORCHOTEL", "TORCH_OTEL", "PROMETHEUS_")
_NEAR, _VERY_NEAR = 0.8, 0.9
"""Similarity to a known name from which a variable counts as misspelt, with one of the prefixes and without."""
_OTHERS = ("OTEL_PYTHON_", "OTEL_INSTRUMENTATION_", "OTEL_RESOURCE_PROVIDERS_")
"""Prefixes of variables that instrumentations define themselves."""


def check_variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Compare the variables with the names that torchotel and OpenTelemetry know."""
    known_names = known_variables() | VARIABLES.keys() | _opentelemetry() | {BACKENDS_VARIABLE}
    unknown = [
        finding for name in sorted(environ) if name not in known_names and (finding := _unknown(name, known_names))
    ]
    yield from unknown
    used = sorted(name for name in environ if name in known_names and environ[name].strip())
    if not unknown:
        yield ok(_VARIABLES, f"no name looks misspelt; {len(used)} of OTEL_* and TORCHOTEL_* are set")
    unread = [VARIABLES[name] for name in used if name in VARIABLES and VARIABLES[name].reader == "none"]
    if unread:
        lines = "\n".join(f"{variable.name}: {variable.does}" for variable in unread)
        yield ok(_VARIABLES, f"torchotel does not use {len(unread)} of them", lines)


def _unknown(name: str, known_names: Collection[str]) -> Finding | None:
    if name.startswith(_OTHERS):
        return None
    near = _nearest(name, known_names)
    if near is not None:
        return warning(_VARIABLES, f"{name} is not known", f"Did you mean {near}?")
    if name.startswith(PREFIX):
        own_names = ", ".join(sorted(other for other in known_names if other.startswith(PREFIX)))
        return warning(_VARIABLES, f"{name} is not known to torchotel", f"Known variables: {own_names}.")
    return None


def _nearest(name: str, known_names: Collection[str]) -> str | None:
    upper = name.upper().replace("-", "_")
    if upper in known_names:
        return upper
    near = get_close_matches(upper, known_names, 1, _NEAR if upper.startswith(_PREFIXES) else _VERY_NEAR)
    return near[0] if near else None


def _opentelemetry() -> set[str]:
    """Return the names of the variables that OpenTelemetry for Python knows."""
    return {name for module in (api, sdk) for name in vars(module) if name.startswith("OTEL_")}


_SPANS = "spans"


def check_providers(config: Config) -> Iterator[Finding]:
    """Report whether a global TracerProvider is set, and the consequence for spans."""
    provider = find_provider(None)
    if provider is not None:
        text = f"a TracerProvider is set globally ({type(provider).__module__}.{type(provider).__qualname__})"
        advice = "Spans of torchotel go through it: its sampler, limits, processors and endpoint apply."
        yield ok(_SPANS, text, advice)
    elif config.set_global_provider:
        yield ok(_SPANS, "set_global_provider: spans of the program are recorded and sent to the same endpoint")
    else:
        text = "torchotel exports its own spans; spans of the program are not recorded, unless it sets a TracerProvider"
        advice = "set_global_provider=True (TORCHOTEL_SET_GLOBAL_PROVIDER=true) sets one with the same endpoint."
        yield ok(_SPANS, text, advice)
