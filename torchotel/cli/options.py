"""Declare command-line flags for the settings of `instrument()`, from the fields of `Config`."""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from torchotel._api import instrument
from torchotel._types import UNSET
from torchotel.config.config import Config
from torchotel.config.settings import Setting, all_of
from torchotel.config.validators import TARGET

_PLACEHOLDERS: Mapping[Any, str] = {
    int: "N",
    float: "X",
    bool: "true|false",
    str: "TEXT",
    Path: "DIR",
    tuple: "A,B,…",
    Mapping: "NAME=VALUE,…",
}
"""Placeholders for values in the help, by type."""


_EXPORT = "export of traces and metrics"
_PROMETHEUS = "scrape endpoint"
_RECORDING = "recording"
_GROUPS = {
    **dict.fromkeys(("service_name", "endpoint", "protocol", "headers", "compression"), _EXPORT),
    **dict.fromkeys(("traces_exporter", "metrics_exporter", "set_global_provider"), _EXPORT),
    **dict.fromkeys(("prometheus_port", "prometheus_host", "discovery_dir"), _PROMETHEUS),
}
"""Headings of the help by setting; the other settings are under "recording"."""
RUN_FOLDER = "Folder of the run file; left out: torchotel-runs/<time>-<name>."
"""Help of `record` for commands that always write a run file."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare a flag for each setting that has a text form; a flag has no default."""
    docs = {**field_docs(), "record": RUN_FOLDER}
    groups = {title: parser.add_argument_group(title) for title in (_RECORDING, _EXPORT, _PROMETHEUS)}
    for name, (hint, setting) in _options().items():
        flag, group = flag_of(name), groups[_GROUPS.get(name, _RECORDING)]
        text = _help(docs.get(name, ""), setting)
        if hint is bool:
            group.add_argument(
                flag, dest=name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
            )
        else:
            group.add_argument(flag, dest=name, metavar=_metavar(hint), default=argparse.SUPPRESS, help=text)


def read_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings from the command line.

    Raises:
        ConfigError: A value is invalid; the message names the flag.
    """
    explicit: dict[str, Any] = {}
    for name, (_, setting) in _options().items():
        value = getattr(arguments, name, UNSET)
        if isinstance(value, str):  # read by the rules for variables
            flag = flag_of(name)
            target = name == "endpoint" and getattr(arguments, "protocol", "") == "grpc"
            kind = (TARGET if target else setting.kind)._replace(ours=all_of)  # every value of a flag is for torchotel
            value = setting._replace(kind=kind, variables=(flag,)).read(name, {flag: value})
        if value is not UNSET:
            explicit[name] = value
    return explicit


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return f"--{name.replace('_', '-')}"


def _options() -> dict[str, tuple[Any, Setting]]:
    """Return type and declaration of each setting with a variable; other settings are objects without a text form."""
    hints = get_type_hints(Config, include_extras=True)
    options = {}
    for name in inspect.signature(instrument).parameters:
        if name in hints:
            hint, setting = get_args(hints[name])
            if setting.variables:
                options[name] = hint, setting
    return options


def _metavar(hint: Any) -> str:
    kind = get_origin(hint) or hint
    if kind is Literal:
        return "|".join(get_args(hint))
    if kind in _PLACEHOLDERS:
        return _PLACEHOLDERS[kind]
    return "|".join(_metavar(part) for part in get_args(hint) if part is not NoneType)


def _help(doc: str, setting: Setting) -> str:
    takes_none = "'none'" in setting.kind.takes
    text = " ".join(doc.replace("None:", "none:" if takes_none else "left out:").split())
    return f"{text} [{setting.variables[-1]}]".replace("%", "%%")


def field_docs() -> dict[str, str]:
    """Return the docstring of each field of `Config`; empty if the package has no source files."""
    try:
        source = textwrap.dedent(inspect.getsource(Config))
    except OSError:
        return {}
    (definition,) = ast.parse(source).body
    body = definition.body if isinstance(definition, ast.ClassDef) else []
    return {
        field.target.id: doc.value.value
        for field, doc in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(doc, ast.Expr)
        and isinstance(doc.value, ast.Constant)
        and isinstance(doc.value.value, str)
    }
