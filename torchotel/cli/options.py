"""The options of `instrument()` as flags, made from the fields of `Config`: names, kinds and help are theirs."""

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

_WORDS: Mapping[Any, str] = {
    int: "N",
    float: "X",
    bool: "true|false",
    str: "TEXT",
    Path: "DIR",
    tuple: "A,B,…",
    Mapping: "NAME=VALUE,…",
}
"""What stands for a value of a type."""


_EXPORT = "export of traces and metrics"
_PROMETHEUS = "scrape endpoint"
_RECORDED = "recording"
_GROUPS = {
    **dict.fromkeys(("service_name", "endpoint", "protocol", "headers", "compression"), _EXPORT),
    **dict.fromkeys(("traces_exporter", "metrics_exporter", "set_global_provider"), _EXPORT),
    **dict.fromkeys(("prometheus_port", "prometheus_host", "discovery_dir"), _PROMETHEUS),
}
"""Headings of the help; all other options are of what is recorded."""
RUN_FOLDER = "Folder of the run file; left out: torchotel-runs/<time>-<name>."
"""What `record` means to commands, which always record."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare a flag for each option of `instrument()` that text can say; none has a default of its own."""
    docs = {**field_docs(), "record": RUN_FOLDER}
    groups = {title: parser.add_argument_group(title) for title in (_RECORDED, _EXPORT, _PROMETHEUS)}
    for name, (hint, setting) in _options().items():
        flag, group = flag_of(name), groups[_GROUPS.get(name, _RECORDED)]
        text = _help(docs.get(name, ""), setting)
        if hint is bool:
            group.add_argument(
                flag, dest=name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
            )
        else:
            group.add_argument(flag, dest=name, metavar=_metavar(hint), default=argparse.SUPPRESS, help=text)


def read_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Give the settings that were said on the command line.

    Raises:
        ConfigError: One is bad; it names the flag.
    """
    explicit: dict[str, Any] = {}
    for name, (_, setting) in _options().items():
        value = getattr(arguments, name, UNSET)
        if isinstance(value, str):  # read as the text of a variable is
            flag = flag_of(name)
            target = name == "endpoint" and getattr(arguments, "protocol", "") == "grpc"
            kind = (TARGET if target else setting.kind)._replace(ours=all_of)  # a flag is for nobody else
            value = setting._replace(kind=kind, variables=(flag,)).read(name, {flag: value})
        if value is not UNSET:
            explicit[name] = value
    return explicit


def flag_of(name: str) -> str:
    """Name the flag of a setting."""
    return f"--{name.replace('_', '-')}"


def _options() -> dict[str, tuple[Any, Setting]]:
    """Give type and setting of each; those without a variable are objects, which only a program can make."""
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
    if kind in _WORDS:
        return _WORDS[kind]
    return "|".join(_metavar(part) for part in get_args(hint) if part is not NoneType)


def _help(doc: str, setting: Setting) -> str:
    takes_none = "'none'" in setting.kind.takes
    text = " ".join(doc.replace("None:", "none:" if takes_none else "left out:").split())
    return f"{text} [{setting.variables[-1]}]".replace("%", "%%")


def field_docs() -> dict[str, str]:
    """Read the string under each field; there is none where torchotel is installed without its source."""
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
