"""Declare a setting: its type, its variables and its documentation."""

import ast
import inspect
import itertools
import sys
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from torchotel._types import UNSET, ConfigError
from torchotel._utils.faults import warn_once

AcceptedPart: TypeAlias = Callable[[str], str]
"""Gives what is left of a variable's text for torchotel; empty: nothing."""


def all_of(text: str) -> str:
    """Leave nothing out."""
    return text


def without(*others: str) -> AcceptedPart:
    """Leave out some words of a list, or the only one."""
    return lambda text: ",".join(word for word in text.split(",") if word.strip().lower() not in others)


def only(*words: str) -> AcceptedPart:
    """Keep the known words of a list, and "none"."""
    return lambda text: ",".join(word for word in text.split(",") if word.strip().lower() in {*words, "none"})


def first(*words: str) -> AcceptedPart:
    """Keep the first known word of a list, by the order of `words`."""

    def ours(text: str) -> str:
        left = only(*words)(text)
        found = {word.strip().lower() for word in left.split(",")}
        return left if "none" in found else next((word for word in words if word in found), "")

    return ours


def _same(value: object) -> object:
    return value


class ValueType(NamedTuple):
    """One kind of setting."""

    takes: str
    """Ends the sentence "timeout_s: got 'x', takes …"."""
    check: Callable[[object], object]
    """Give back the value in its one form, or raise ValueError."""
    parse: Callable[[str], object] = str
    """Read a variable's text, or raise ValueError."""
    show: Callable[[object], object] = _same
    """What an error may repeat of a bad value."""
    otherwise: object = UNSET
    """What a bad value of a variable of OpenTelemetry counts as; UNSET: the variable is ignored."""
    ours: AcceptedPart = all_of
    """What of a variable's text is for torchotel."""


def optional(kind: ValueType, *, word: str | None = None) -> ValueType:
    """Take None too; a variable says it with `word`."""
    takes = f"{kind.takes}, or None" + (f" ({word!r} in a variable)" if word else "")
    return kind._replace(
        takes=takes,
        check=lambda value: None if value is None else kind.check(value),
        parse=lambda text: None if word and text.lower() == word else kind.parse(text),
    )


def choice(*words: str) -> ValueType:
    """Take one of a few words."""

    def check(value: object) -> object:
        if value not in words:
            raise ValueError
        return value

    return ValueType(" or ".join(f'"{word}"' for word in words), check, str.lower)


def choices(*words: str) -> ValueType:
    """Take any of a few words, comma-separated or in a sequence; "none" takes none of them."""

    def check(value: object) -> object:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
            raise ValueError
        named = tuple(dict.fromkeys(part.strip() for part in parts))
        if named == ("none",):
            return ()
        if not set(named) <= set(words):
            raise ValueError
        return named

    listed = " and ".join(f'"{word}"' for word in words)
    return ValueType(f'any of {listed}, comma-separated or in a list, or "none"', check, str.lower)


def having(*methods: str) -> ValueType:
    """Take an object by the methods that are called on it."""

    def check(value: object) -> object:
        if isinstance(value, type) or not all(callable(getattr(value, method, None)) for method in methods):
            raise ValueError
        return value

    return ValueType(f"an object with {' and '.join(methods)}", check, show=lambda value: type(value).__name__)


def integer(minimum: int, maximum: int | None = None) -> ValueType:
    """Take a whole number from `minimum` on, up to `maximum`; a bool is none."""

    def check(value: object) -> object:
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ValueError
        if maximum is not None and value > maximum:
            raise ValueError
        return min(value, sys.maxsize)  # the largest number that slices and islice take

    upper = "" if maximum is None else f" and at most {maximum}"
    return ValueType(f"a whole number of at least {minimum}{upper}", check, int)


OTEL_PREFIX = "OTEL_"
"""Of variables that other programs read too."""


Group: TypeAlias = Literal["recording", "export of traces and metrics", "scrape endpoint"]
RECORDING: Final = "recording"
EXPORT: Final = "export of traces and metrics"
SCRAPING: Final = "scrape endpoint"


class Setting(NamedTuple):
    """The declaration of a setting, in the annotation of a field of `Config`.

    The field's type, default and docstring belong to the declaration. The command line, `torchotel doctor` and the
    pages are made from it; an argument of `instrument()` is named in its signature, too.
    """

    kind: ValueType
    variables: tuple[str, ...]
    """The first that is set to a value for torchotel wins. Without variables the setting is an argument that takes an
    object of the program, and only the object's class is shown."""
    group: Group = RECORDING
    """Heading in the help of the command line."""
    secret: bool = False
    """Whether the value is never shown: headers and keys carry credentials."""
    default: object = None
    """The field's default, which applies if no variable is set."""

    def checked(self, name: str, value: object) -> Any:
        """Give the value in its one form, or raise ConfigError."""
        try:
            return self.kind.check(value)
        except (ValueError, TypeError):
            raise ConfigError(name, self.kind.show(value), self.kind.takes) from None

    def read(self, name: str, environ: Mapping[str, str]) -> Any:
        """Read the field from its variables; UNSET if none is set to a value that can be read.

        A bad value of OpenTelemetry's variables is ignored with a warning, since it may be meant for another program
        (https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/#parsing-empty-value).

        Raises:
            ConfigError: A variable of torchotel's own has a bad value.
        """
        # OpenTelemetry: an empty variable is one that is not set.
        present = ((variable, environ.get(variable, "").strip()) for variable in self.variables)
        value, not_ours = UNSET, {}
        for variable, text in present:
            ours = self.kind.ours(text)
            if ours.lower() != text.lower():
                not_ours[variable] = text
            if ours and (value := self._read(name, ours, variable)) is not UNSET:
                break
        for variable, text in not_ours.items():
            used = self.default if value is UNSET else value
            shown = ",".join(used) if isinstance(used, tuple) else used
            warn_once("%s: torchotel does not take %r, and uses %r", variable, text, shown)
        return value

    def _read(self, name: str, text: str, variable: str) -> Any:
        try:
            return self.kind.check(self.kind.parse(text))
        except (ValueError, TypeError):
            if not variable.startswith(OTEL_PREFIX):
                raise ConfigError(name, self.kind.show(text), self.kind.takes, variable) from None
            counts = "is ignored" if self.kind.otherwise is UNSET else f"counts as {self.kind.otherwise}"
            warn_once("%s %s: got %r, takes %s", variable, counts, self.kind.show(text), self.kind.takes)
            return self.kind.otherwise


def env(kind: ValueType, *variables: str, group: Group = RECORDING) -> Setting:
    """Declare a setting that is read from the first of these variables that is set."""
    return Setting(kind, variables, group)


def otlp(kind: ValueType, name: str, *, signal: str = "TRACES", secret: bool = False) -> Setting:
    """Declare a setting that is read from the OTLP exporter's variable of a signal, else from the general one."""
    return Setting(kind, (f"OTEL_EXPORTER_OTLP_{signal}_{name}", f"OTEL_EXPORTER_OTLP_{name}"), EXPORT, secret)


def field_docs(cls: type) -> dict[str, str]:
    """Read the docstrings of a class's fields from its source; empty if torchotel is installed without source."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
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
