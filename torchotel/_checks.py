"""What a setting takes: how its text is read, how its value is checked, how an error describes it."""

import logging
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

_logger = logging.getLogger("torchotel")

_LONG_TIMEOUT_S = 300
# RFC 9110: a header's name is a token; a value that could end its line would let a second header in.
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f]*")


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


def optional(kind: Kind, *, word: str | None = None) -> Kind:
    """Take None too; a variable says it with `word`."""
    takes = f"{kind.takes}, or None" + (f" ({word!r} in a variable)" if word else "")
    return kind._replace(
        takes=takes,
        check=lambda value: None if value is None else kind.check(value),
        parse=lambda text: None if word and text.lower() == word else kind.parse(text),
    )


def choice(*words: str, later: str | None = None) -> Kind:
    """Take one of a few words; `later` is one that a coming version takes."""

    def check(value: object) -> object:
        if value not in words:
            raise ValueError
        return value

    takes = " or ".join(f'"{word}"' for word in words)
    takes += f' ("{later}" comes with a later version)' if later else ""
    return Kind(takes, check, str.lower)


def integer(minimum: int) -> Kind:
    """Take a whole number from `minimum` on; a bool is none."""

    def check(value: object) -> object:
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ValueError
        return value

    return Kind(f"a whole number of at least {minimum}", check, int)


def _check_text(value: object) -> object:
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    return value.strip()


def _check_flag(value: object) -> object:
    if not isinstance(value, bool):
        raise ValueError  # noqa: TRY004 - the caller turns it into a ConfigError
    return value


def _parse_flag(text: str) -> object:
    flags = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in flags:
        raise ValueError
    return flags[text.lower()]


def _parse_otel_flag(text: str) -> object:
    # The specification: only "true" is true, all else is false and worth a warning.
    if text.lower() not in {"true", "false"}:
        _logger.warning("OTEL_SDK_DISABLED takes 'true' or 'false'; %r counts as 'false'", text)
    return text.lower() == "true"


def _check_seconds(value: object) -> object:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError  # noqa: TRY004 - the caller turns it into a ConfigError
    if not math.isfinite(value) or value <= 0:
        raise ValueError
    return float(value)


def _parse_seconds(text: str) -> object:
    seconds = float(text)
    if seconds > _LONG_TIMEOUT_S:
        # The specification says milliseconds, Python's SDK reads seconds.
        _logger.warning("the OTLP timeout is read in seconds, as by OpenTelemetry for Python: %g s", seconds)
    return seconds


def _check_url(value: object) -> object:
    url = _check_text(value)
    assert isinstance(url, str)  # noqa: S101 - says so to the type checker
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname or re.search(r"\s", url):
        raise ValueError
    _ = parts.port  # raises ValueError where it is no port
    return url


def _check_base_url(value: object) -> object:
    url = _check_url(value)
    if "?" in str(url) or "#" in str(url):
        raise ValueError  # a path is added to it, which would end up in the query
    return url


def _check_headers(value: object) -> object:
    if not isinstance(value, Mapping):
        raise ValueError  # noqa: TRY004 - the caller turns it into a ConfigError
    for name, text in value.items():
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise ValueError
        if not isinstance(text, str) or not _HEADER_VALUE.fullmatch(text):
            raise ValueError
    return MappingProxyType(dict(value))


def _parse_headers(text: str) -> object:
    """Read `k=v,k2=v2`, values URL-encoded; a pair that cannot be read is left out with a warning."""
    headers = {}
    for number, pair in enumerate(text.split(","), 1):
        if not pair.strip():
            continue
        name, equals, value = (unquote(part).strip() for part in pair.partition("="))
        if equals and _HEADER_NAME.fullmatch(name) and _HEADER_VALUE.fullmatch(value):
            headers[name.lower()] = value
        else:
            # Its text may be a secret.
            _logger.warning("header number %d of the OTLP headers is left out: it does not read name=value", number)
    return headers


def _show_headers(value: object) -> object:
    if isinstance(value, Mapping):
        return dict.fromkeys(value, "…")
    return type(value).__name__


def _check_patterns(value: object) -> object:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple | set | frozenset) or not parts:
        raise ValueError
    return tuple(str(_check_text(part)) for part in parts)


def _check_folder(value: object) -> object:
    path = Path(str(_check_text(os.fspath(value) if isinstance(value, os.PathLike) else value))).expanduser()
    if path.exists() and not path.is_dir():
        raise ValueError
    return path


def _check_file(value: object) -> object:
    path = _check_text(os.fspath(value) if isinstance(value, os.PathLike) else value)
    if not Path(str(path)).is_file():
        raise ValueError
    return path


def _check_detail(value: object) -> object:
    return value if value in ("auto", "all", "off") else integer(1).check(value)


def _parse_detail(text: str) -> object:
    return int(text) if text.lstrip("+-").isdecimal() else text.lower()


TEXT = Kind("a string that is not empty", _check_text)
FLAG = Kind("True or False (in a variable: true, false, 1, 0)", _check_flag, _parse_flag)
OTEL_FLAG = Kind("True or False", _check_flag, _parse_otel_flag)
SECONDS = Kind("a number of seconds above 0", _check_seconds, _parse_seconds)
URL = Kind("an http:// or https:// URL with a host", _check_url)
BASE_URL = Kind("an http:// or https:// URL with a host and no query", _check_base_url)
HEADERS = Kind("a mapping of header names to strings of one line", _check_headers, _parse_headers, _show_headers)
PATTERNS = Kind("patterns on module paths: comma-separated or a list of strings", _check_patterns)
FOLDER = Kind("the path of a folder, there or to be made", _check_folder)
FILE = Kind("the path of a file that is there", _check_file)
DETAIL = Kind('"auto", "all", "off" or a whole number of at least 1', _check_detail, _parse_detail)
