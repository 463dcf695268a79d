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
"""Returns the part of a variable's text that torchotel takes; empty if it takes nothing."""


def whole(text: str) -> str:
    """Take the whole text."""
    return text


def without(*words: str) -> AcceptedPart:
    """Take a list without these words."""
    return lambda text: ",".join(word for word in text.split(",") if word.strip().lower() not in words)


def only(*words: str) -> AcceptedPart:
    """Take these words of a list, and "none"."""
    return lambda text: ",".join(word for word in text.split(",") if word.strip().lower() in {*words, "none"})


def first(*words: str) -> AcceptedPart:
    """Take the first of these words that is in a list, or "none"."""

    def accept(text: str) -> str:
        left = only(*words)(text)
        found = {word.strip().lower() for word in left.split(",")}
        return left if "none" in found else next((word for word in words if word in found), "")

    return accept


def _same(value: object) -> object:
    return value


class ValueType(NamedTuple):
    """The values of a setting, and how they are parsed and validated."""

    takes: str
    """The allowed values, as in "timeout_s: got 'x', takes …"."""
    check: Callable[[object], object]
    """Return the value in normal form, or raise ValueError."""
    parse: Callable[[str], object] = str
    """Parse the text of a variable, or raise ValueError."""
    show: Callable[[object], object] = _same
    """Return the part of a bad value that an error may quote: values may be secret."""
    fallback: object = UNSET
    """The value that replaces a bad value of an OTEL_* variable; UNSET: the variable is ignored."""
    accept: AcceptedPart = whole
    """Returns the part of a variable's text that torchotel takes."""


def optional(kind: ValueType, *, word: str | None = None) -> ValueType:
    """Take None, too; in a variable it is written as `word`."""
    takes = f"{kind.takes}, or None" + (f" ({word!r} in a variable)" if word else "")
    return kind._replace(
        takes=takes,
        check=lambda value: None if value is None else kind.check(value),
        parse=lambda text: None if word and text.lower() == word else kind.parse(text),
    )


def choice(*words: str) -> ValueType:
    """Take one of these words."""

    def check(value: object) -> object:
        if value not in words:
            raise ValueError
        return value

    return ValueType(" or ".join(f'"{word}"' for word in words), check, str.lower)


def choices(*words: str) -> ValueType:
    """Take any of these words, comma-separated or in a sequence; "none" is the empty choice."""

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
    """Take an object that has these methods."""

    def check(value: object) -> object:
        if isinstance(value, type) or not all(callable(getattr(value, method, None)) for method in methods):
            raise ValueError
        return value

    return ValueType(f"an object with {' and '.join(methods)}", check, show=lambda value: type(value).__name__)


def integer(minimum: int, maximum: int | None = None) -> ValueType:
    """Take a whole number from `minimum` to `maximum`, and no bool."""

    def check(value: object) -> object:
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ValueError
        if maximum is not None and value > maximum:
            raise ValueError
        return min(value, sys.maxsize)  # the maximum of slices and islice

    upper = "" if maximum is None else f" and at most {maximum}"
    return ValueType(f"a whole number of at least {minimum}{upper}", check, int)


OTEL_PREFIX = "OTEL_"
"""Prefix of variables that other programs read, too."""


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

    def validate(self, name: str, value: object) -> Any:
        """Return the value in normal form, or raise ConfigError."""
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
        value, partly_taken = UNSET, {}
        for variable, text in present:
            accepted = self.kind.accept(text)
            if accepted.lower() != text.lower():
                partly_taken[variable] = text
            if accepted and (value := self._read(name, accepted, variable)) is not UNSET:
                break
        for variable, text in partly_taken.items():
            used = self.default if value is UNSET else value
            shown = ",".join(used) if isinstance(used, tuple) else used
            warn_once("%s: torchotel's own exporters do not take %r, and use %r", variable, text, shown)
        return value

    def _read(self, name: str, text: str, variable: str) -> Any:
        try:
            return self.kind.check(self.kind.parse(text))
        except (ValueError, TypeError):
            if not variable.startswith(OTEL_PREFIX):
                raise ConfigError(name, self.kind.show(text), self.kind.takes, variable) from None
            counts = "is ignored" if self.kind.fallback is UNSET else f"counts as {self.kind.fallback}"
            warn_once("%s %s: got %r, takes %s", variable, counts, self.kind.show(text), self.kind.takes)
            return self.kind.fallback


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
