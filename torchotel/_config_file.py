"""OpenTelemetry's declarative configuration, of which torchotel reads one key: `disabled`.

https://opentelemetry.io/docs/specs/otel/configuration/data-model/
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from torchotel._warn import warn_once

VARIABLES = ("OTEL_CONFIG_FILE", "OTEL_EXPERIMENTAL_CONFIG_FILE")
"""The stable name and the one that older SDKs read; the first that is set counts."""
_MAX_CHARACTERS = 1_000_000
# A YAML parser is no dependency, and a key at the top level stands at the beginning of its line.
_DISABLED = re.compile(r"""^["']?disabled["']?\s*:\s*["']?(.*?)["']?\s*(?:#.*)?$""", re.MULTILINE)
_SUBSTITUTION = re.compile(r"\$\{(?:env:)?(\w+)(?::-([^}\n]*))?\}")


def disables(environ: Mapping[str, str]) -> bool:
    """Tell whether the configuration file switches telemetry off, and warn that torchotel reads nothing else of it."""
    variable = next((name for name in VARIABLES if environ.get(name, "").strip()), None)
    if variable is None:
        return False
    path = Path(environ[variable].strip())
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(_MAX_CHARACTERS)
    except (OSError, ValueError) as error:
        warn_once("%s is ignored: %s cannot be read (%s). Correct the path, or unset it", variable, path, str(error))
        return False
    if _read_disabled(_substituted(text, environ)):
        return True
    warn_once(
        "%s: torchotel reads only `disabled` of %s. Set its exporters, endpoint and sampler by arguments or variables",
        variable,
        path,
    )
    return False


def _substituted(text: str, environ: Mapping[str, str]) -> str:
    return _SUBSTITUTION.sub(lambda found: environ.get(found[1]) or found[2] or "", text)


def _read_disabled(text: str) -> bool:
    try:  # JSON is YAML too, and its top level may be indented
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        found = _DISABLED.search(text)
        return found is not None and found[1].lower() == "true"
    return isinstance(parsed, dict) and parsed.get("disabled") is True
