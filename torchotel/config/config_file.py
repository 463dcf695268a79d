"""OpenTelemetry's declarative configuration, of which torchotel reads one key: `disabled`.

https://opentelemetry.io/docs/specs/otel/configuration/data-model/
"""

import re
from collections.abc import Mapping
from io import StringIO
from pathlib import Path

from torchotel._utils.faults import warn_once

VARIABLES = ("OTEL_CONFIG_FILE", "OTEL_EXPERIMENTAL_CONFIG_FILE")
"""The stable name, and the name that older SDKs read; the first that is set is used."""
_MAX_CHARACTERS = 100_000
"""Most characters that are parsed; PyYAML takes about a second for them."""
_TRUE = frozenset({"true", "yes", "on"})
"""The words for true in YAML 1.1; a quoted word counts, too."""
_SUBSTITUTION = re.compile(r"\$\{(?:env:)?(\w+)(?::-([^}\n]*))?\}")


def disables(environ: Mapping[str, str]) -> bool:
    """Return whether the configuration file disables telemetry; warn that torchotel ignores its other keys."""
    variable = next((name for name in VARIABLES if environ.get(name, "").strip()), None)
    if variable is None:
        return False
    path = Path(environ[variable].strip())
    try:
        disabled = _read_disabled(path)
    except (OSError, ValueError, RecursionError) as error:
        warn_once("%s is ignored: %s cannot be read (%s)", variable, path, str(error))
        return False
    if _substituted(disabled, environ).lower() in _TRUE:
        return True
    warn_once(
        "%s: torchotel reads only `disabled` of %s. Set its exporters, endpoint and sampler by arguments or variables",
        variable,
        path,
    )
    return False


def _read_disabled(path: Path) -> str:
    """Return the text of the top-level scalar `disabled` in a YAML file; empty if there is none."""
    import yaml  # noqa: PLC0415  # few programs set the variable

    with path.open(encoding="utf-8-sig") as file:
        text = file.read(_MAX_CHARACTERS + 1)
    if len(text) > _MAX_CHARACTERS:
        message = f"it has more than {_MAX_CHARACTERS} characters"
        raise ValueError(message)
    try:
        # Nodes, not values: merge keys (`<<`) of nested aliases grow exponentially when values are built from them.
        # From a stream: an error in a string quotes the line, which may hold the headers of an exporter.
        root = yaml.compose(StringIO(text), yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    scalars = (value.value for key, value in pairs if key.value == "disabled" and isinstance(value, yaml.ScalarNode))
    return next(scalars, "")


def _substituted(text: str, environ: Mapping[str, str]) -> str:
    return _SUBSTITUTION.sub(lambda found: environ.get(found[1]) or found[2] or "", text)
