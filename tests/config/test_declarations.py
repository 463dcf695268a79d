"""A setting is declared once, in `Config`: arguments, options and pages agree with the declaration."""

import argparse
import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import TracerProvider
from prometheus_client import CollectorRegistry
from torch.nn import Module

from torchotel import _api, instrument
from torchotel._handle import Handle
from torchotel._types import UNSET, Unset
from torchotel.cli.options import add_options, flag_of
from torchotel.config.config import SETTINGS, Config
from torchotel.config.settings import field_docs

ARGUMENTS = [name for name in inspect.signature(instrument).parameters if name != "model"]
TYPES = [Handle, Mapping, Sequence, Path, Literal, MeterProvider, TracerProvider, CollectorRegistry, Module]
"""What the signature of `instrument()` names, which `torchotel._api` imports for type checking only."""


def alternatives(hint: Any) -> set[object]:
    """Return the words and the plain types that a type allows."""
    if get_origin(hint) in {Union, UnionType, Literal}:
        return {one for part in get_args(hint) for one in alternatives(part)}
    return {hint} if hint in {bool, int, float, NoneType} or not isinstance(hint, type) else set()


def test_each_argument_is_a_setting() -> None:
    assert [name for name in ARGUMENTS if name not in SETTINGS] == []
    defaults = {inspect.signature(instrument).parameters[name].default for name in ARGUMENTS}
    assert defaults == {UNSET}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_has_the_type_of_its_field(name: str) -> None:
    """As far as words, numbers and None go: a field has the form that a checked value has."""
    known = {one.__name__ if isinstance(one, type) else "Literal": one for one in TYPES}
    argument = get_type_hints(instrument, {**vars(_api), **known})[name]
    declared = get_type_hints(Config)[name]
    words = {one for one in alternatives(argument) if one is not Unset and get_origin(one) is None}
    expected = {NoneType} if declared is Any else {one for one in alternatives(declared) if get_origin(one) is None}
    assert words == expected


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_is_documented_by_its_variable_and_default(name: str) -> None:
    """The docstring of `instrument()` has an entry that begins with the variable and ends with the default."""
    entries = dict(re.findall(r"^    (\w+): ((?:.|\n {6})*)", inspect.cleandoc(str(instrument.__doc__)), re.MULTILINE))
    entry = " ".join(entries[name].split())
    setting = SETTINGS[name]
    assert not setting.variables or entry.startswith(setting.variables[-1])
    if isinstance(setting.default, bool | int | float | str) and name != "endpoint":
        assert entry.rpartition("; ")[2].strip("`.") == str(setting.default)


def test_options_are_the_arguments_that_text_can_hold() -> None:
    """Each has the help of its declaration, below the heading of its declaration."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    found = {
        action.dest: (group.title, action.option_strings[0], str(action.help))
        for group in parser._action_groups
        for action in group._group_actions
        if action.dest != "help"
    }
    declared = {name: SETTINGS[name] for name in ARGUMENTS if SETTINGS[name].variables}
    assert {name: (title, flag) for name, (title, flag, _) in found.items()} == {
        name: (setting.group, flag_of(name)) for name, setting in declared.items()
    }
    assert [
        name for name, (_, _, text) in found.items() if not text.endswith(f"[{declared[name].variables[-1]}]")
    ] == []


def test_the_page_has_each_setting_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables of arguments and of variables together have all settings, with their variables and meanings."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs"))
    monkeypatch.delitem(sys.modules, "tables", raising=False)
    from tables import TABLES  # noqa: PLC0415  # a script beside the pages

    docs = field_docs(Config)
    assert set(docs) == set(SETTINGS)
    tables = {"arguments": TABLES["arguments"]().splitlines()[2:], "variables": TABLES["variables"]().splitlines()[2:]}
    for name, setting in SETTINGS.items():
        is_argument = name in ARGUMENTS
        first = [f"`{name}`"] if is_argument else []
        cell = "<br>".join([*first, *(f"`{variable}`" for variable in setting.variables)])
        rows = [row for row in tables["arguments" if is_argument else "variables"] if row.startswith(f"| {cell} |")]
        assert [docs[name].replace("|", "\\|") in row for row in rows] == [True], name
    assert sum(map(len, tables.values())) == len(SETTINGS)
