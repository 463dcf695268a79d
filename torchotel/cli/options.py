"""The command line's options: one for each argument of `instrument()`, made from its declaration in `Config`."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from torchotel._api import instrument
from torchotel._types import UNSET
from torchotel.config.config import SETTINGS, Config
from torchotel.config.settings import EXPORT, RECORDING, SCRAPING, Setting, field_docs, whole
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
"""The placeholder in the help for a value of a type."""


RUN_FOLDER = "Folder of the run file; left out: torchotel-runs/<time>-<name>."
"""Help of `record`: commands always record, while `instrument()` does not by default."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each setting of `options()`; without the option, the setting's variable is read."""
    docs = {**field_docs(Config), "record": RUN_FOLDER}
    groups = {title: parser.add_argument_group(title) for title in (RECORDING, EXPORT, SCRAPING)}
    hints = get_type_hints(Config)
    for name, setting in options().items():
        flag, group, hint = flag_of(name), groups[setting.group], hints[name]
        text = _help(docs.get(name, ""), setting)
        if hint is bool:
            group.add_argument(
                flag, dest=name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
            )
        else:
            group.add_argument(flag, dest=name, metavar=_metavar(hint), default=argparse.SUPPRESS, help=text)


def read_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that were passed as options.

    Raises:
        ConfigError: An option has a bad value; the error names the option.
    """
    explicit: dict[str, Any] = {}
    for name, setting in options().items():
        value = getattr(arguments, name, UNSET)
        if isinstance(value, str):  # parsed as the text of a variable is
            flag = flag_of(name)
            target = name == "endpoint" and getattr(arguments, "protocol", "") == "grpc"
            kind = (TARGET if target else setting.kind)._replace(accept=whole)  # an option is for torchotel only
            value = setting._replace(kind=kind, variables=(flag,)).read(name, {flag: value})
        if value is not UNSET:
            explicit[name] = value
    return explicit


def flag_of(name: str) -> str:
    """Return the option of a setting."""
    return f"--{name.replace('_', '-')}"


def options() -> dict[str, Setting]:
    """Return the settings that are options: arguments of `instrument()`, except those that take an object."""
    arguments = inspect.signature(instrument).parameters
    return {name: SETTINGS[name] for name in arguments if name in SETTINGS and SETTINGS[name].variables}


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
