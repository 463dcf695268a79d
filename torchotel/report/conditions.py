"""What a run was made under, by its own words, and where two sides differ in it; pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torchotel import _names as names

Conditions: TypeAlias = Mapping[str, str]
"""By name; what a run does not say is not there."""

_RESOURCE = {
    "host": "host.name",
    "torch": names.TORCH_VERSION,
    "CUDA": names.CUDA_VERSION,
    "ranks": names.WORLD_SIZE,
    "rank": names.RANK,
}
_SETTINGS = (
    "detail",
    "overhead_budget",
    "include",
    "exclude",
    "max_depth",
    "max_spans",
    "shapes",
    "gradient_norms",
    "module_histograms",
    "traces_exporter",
    "tracer_provider",
)
"""Those that change what a step costs, or which layers it has."""
_ENDS = {True: "finished", False: "not ended, or cut short"}


class Difference(NamedTuple):
    """One thing that two sides do not share."""

    name: str
    before: str
    after: str


def conditions(info: Mapping[str, Any], devices: Iterable[str]) -> Conditions:
    """Read them off `run.json`, which may be a stranger's, and the devices of the modules."""
    resource, settings, model = (info.get(part) or {} for part in ("resource", "config", "model"))
    found = {
        "program": _text(info.get("service_name")),
        "model": _model(model) if model else "",
        "device": ", ".join(sorted(devices)),
        "torchotel": _text(info.get("torchotel.version")),
        **{name: _text(resource.get(key)) for name, key in _RESOURCE.items()},
        # A setting that is None is not written down.
        **({name: _text(settings.get(name)) or "None" for name in _SETTINGS} if settings else {}),
        "end": _ENDS.get(info.get("finished", ""), ""),
    }
    return {name: text for name, text in found.items() if text}


def differences(before: Sequence[Conditions], after: Sequence[Conditions]) -> Sequence[Difference]:
    """Find what is known of both sides and not the same; several runs of a side may differ among themselves."""
    known = dict.fromkeys(name for run in (*before, *after) for name in run)
    found = []
    for name in known:
        values = [sorted({run[name] for run in side if name in run}) for side in (before, after)]
        if all(values) and values[0] != values[1]:
            found.append(Difference(name, *map(", ".join, values)))
    return found


def _model(model: Mapping[str, Any]) -> str:
    return f"{model.get('name', '?')}, {model.get('modules', 0):,} modules, {model.get('parameters', 0):,} parameters"


def _text(value: object) -> str:
    """Write a plain value, or a list of them; what else a stranger has put there is left out."""
    values = value if isinstance(value, list) else [value]
    return ", ".join(str(value) for value in values if isinstance(value, str | int | float))
