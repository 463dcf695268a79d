"""What kinds of settings have in common: how text is read, how a value is checked, how an error describes it."""

import sys
from collections.abc import Callable
from typing import NamedTuple

from torchotel._shared import Ours, all_of
from torchotel._unset import UNSET


def _same(value: object) -> object:
    return value


class Kind(NamedTuple):
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
    ours: Ours = all_of
    """What of a variable's text is for torchotel."""


def optional(kind: Kind, *, word: str | None = None) -> Kind:
    """Take None too; a variable says it with `word`."""
    takes = f"{kind.takes}, or None" + (f" ({word!r} in a variable)" if word else "")
    return kind._replace(
        takes=takes,
        check=lambda value: None if value is None else kind.check(value),
        parse=lambda text: None if word and text.lower() == word else kind.parse(text),
    )


def choice(*words: str) -> Kind:
    """Take one of a few words."""

    def check(value: object) -> object:
        if value not in words:
            raise ValueError
        return value

    return Kind(" or ".join(f'"{word}"' for word in words), check, str.lower)


def choices(*words: str) -> Kind:
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
    return Kind(f'any of {listed}, comma-separated or in a list, or "none"', check, str.lower)


def having(*methods: str) -> Kind:
    """Take an object by the methods that are called on it."""

    def check(value: object) -> object:
        if isinstance(value, type) or not all(callable(getattr(value, method, None)) for method in methods):
            raise ValueError
        return value

    return Kind(f"an object with {' and '.join(methods)}", check, show=lambda value: type(value).__name__)


def integer(minimum: int, maximum: int | None = None) -> Kind:
    """Take a whole number from `minimum` on, up to `maximum`; a bool is none."""

    def check(value: object) -> object:
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ValueError
        if maximum is not None and value > maximum:
            raise ValueError
        return min(value, sys.maxsize)  # the largest number that slices and islice take

    upper = "" if maximum is None else f" and at most {maximum}"
    return Kind(f"a whole number of at least {minimum}{upper}", check, int)
