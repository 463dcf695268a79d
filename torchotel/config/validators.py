"""The value types of settings: text, numbers, URLs, headers, files and patterns."""

import math
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from urllib.parse import unquote, urlsplit

from torchotel._utils.faults import warn_once
from torchotel.config.otlp_endpoint import address_of, without_credentials
from torchotel.config.settings import ValueType, integer

_LONG_TIMEOUT_S = 300
_NO_LIMIT_S = 86_400.0
"""A day, the longest timeout: sockets and locks have a maximum. A timeout of 0, "no limit", becomes a day."""
_MAX_PATH = 1024
DEFAULT_SAMPLER = "parentbased_always_on"
SAMPLERS = (
    "always_on",
    "always_off",
    "traceidratio",
    DEFAULT_SAMPLER,
    "parentbased_always_off",
    "parentbased_traceidratio",
)
"""OpenTelemetry's names of the samplers that need no other service."""
# A token (https://www.rfc-editor.org/rfc/rfc9110#name-tokens). A line break in a value would inject a header.
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
# The characters that both HTTP and gRPC allow. With other characters each request would fail.
_HEADER_VALUE = re.compile(r"(?! )[ -~]*")


def _check_text(value: object) -> object:
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    return value.strip()


def _parse_host(text: str) -> object:
    """Return a host that this machine can listen on; the variable may be meant for another program."""
    name = text.encode() if text.isascii() else text  # as the scrape endpoint encodes it
    try:
        family, *_, address = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError as error:  # a bad name raises UnicodeError, which is a ValueError
        raise ValueError from error
    return text


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
    if text.lower() not in {"true", "false"}:
        raise ValueError
    return text.lower() == "true"


def _check_seconds(value: object) -> object:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError  # noqa: TRY004 - the caller turns it into a ConfigError
    if not math.isfinite(value) or value <= 0:
        raise ValueError
    return min(float(value), _NO_LIMIT_S)


def _parse_seconds(text: str) -> object:
    seconds = float(text)
    if _LONG_TIMEOUT_S < seconds < math.inf:
        # The specification has milliseconds, and OpenTelemetry's SDK for Python reads seconds.
        warn_once(
            "the OTLP timeout is %g seconds, the unit of OpenTelemetry for Python. If you meant ms, correct it", seconds
        )
    return seconds or _NO_LIMIT_S


def _parse_milliseconds(text: str) -> object:
    return float(text) / 1000


def _parse_timeout_milliseconds(text: str) -> object:
    return _parse_milliseconds(text) or _NO_LIMIT_S


def _check_url(value: object) -> object:
    url = _check_text(value)
    assert isinstance(url, str)  # noqa: S101 - for the type checker
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname or re.search(r"\s", url):
        raise ValueError
    _ = parts.port  # raises ValueError for a bad port
    return url


def _check_base_url(value: object) -> object:
    url = _check_url(value)
    if "?" in str(url) or "#" in str(url):
        raise ValueError  # the signal's path is appended, and would become a part of the query
    return url


def _parse_base_url(text: str) -> object:
    # https://opentelemetry.io/docs/specs/otel/protocol/exporter/#endpoint-urls-for-otlphttp: the other parts are used.
    url = _check_url(re.split("[?#]", text, maxsplit=1)[0])
    if url != text:
        warn_once("OTEL_EXPORTER_OTLP_ENDPOINT: its query or fragment is ignored, and %s is used", _show_url(url))
    return url


def _check_target(value: object) -> object:
    target = str(_check_text(value))
    if target.startswith(("http://", "https://")):
        return _check_url(target)
    # https://github.com/grpc/grpc/blob/master/doc/naming.md: host:port, dns:///host:port, unix:/path.
    if ":" not in target or re.search(r"\s", target):
        raise ValueError
    address_of(target, insecure=True)  # raises ValueError for a bad address in brackets
    return target


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
    """Read `k=v,k2=v2`, values URL-encoded; a bad pair is ignored with a warning."""
    headers = {}
    for number, pair in enumerate(text.split(","), 1):
        if not pair.strip():
            continue
        name, equals, value = (unquote(part).strip() for part in pair.partition("="))
        if equals and _HEADER_NAME.fullmatch(name) and _HEADER_VALUE.fullmatch(value):
            headers[name.lower()] = value
        else:
            # The text of the header may be a secret.
            warn_once("header number %d of the OTLP headers is ignored. Write name=value, in visible ASCII", number)
    return headers


def _show_headers(value: object) -> object:
    if isinstance(value, Mapping):
        # A bad name may be a whole header with its value.
        return {name if _HEADER_NAME.fullmatch(str(name)) else "…": "…" for name in value}
    return type(value).__name__


def _show_url(value: object) -> object:
    return without_credentials(value) if isinstance(value, str) else value


def _show_file(value: object) -> object:
    """Return a path, but not the text of a key that was passed in its place."""
    return "…" if isinstance(value, str) and ("-----" in value or len(value) > _MAX_PATH) else value


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


def _check_gradient_norms(value: object) -> object:
    return value if isinstance(value, bool) or value == "auto" else integer(1).check(value)


def _parse_gradient_norms(text: str) -> object:
    word = text.lower()
    if word in {"true", "false", "0"}:
        return word == "true"
    return int(text) if text.isdecimal() else word


def _check_sampler(value: object) -> object:
    if value not in SAMPLERS:
        raise ValueError
    return value


def _parse_sampler(text: str) -> object:
    # https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/#enum: warn and ignore.
    if text.lower() not in SAMPLERS:
        warn_once(
            "OTEL_TRACES_SAMPLER %r is no sampler of torchotel, which ignores it. Use one of %s, or a TracerProvider, "
            "which has its own sampler",
            text,
            ", ".join(SAMPLERS),
        )
        return DEFAULT_SAMPLER
    return text.lower()


def _check_ratio(value: object) -> object:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ValueError
    return float(value)


def _parse_ratio(text: str) -> object:
    try:
        return _check_ratio(float(text))
    except ValueError:
        warn_once("OTEL_TRACES_SAMPLER_ARG %r is ignored. Use a number from 0 to 1", text)
        return 1.0


def _check_budget(value: object) -> object:
    if value == 0:
        raise ValueError
    return _check_ratio(value)


def _parse_detail(text: str) -> object:
    return int(text) if text.lstrip("+-").isdecimal() else text.lower()


TEXT = ValueType("a string that is not empty", _check_text)
HOST = ValueType("an address of this machine", _check_text, _parse_host)
FLAG = ValueType("True or False (in a variable: true, false, 1, 0)", _check_flag, _parse_flag)
OTEL_FLAG = ValueType("True or False", _check_flag, _parse_otel_flag, fallback=False)
"""A Boolean of the specification: "true" is true; all other values are false, with a warning unless "false"."""
SECONDS = ValueType("a number of seconds above 0 (in a variable: 0 for no limit)", _check_seconds, _parse_seconds)
TIMEOUT_MILLISECONDS = ValueType(
    "a number above 0 (in a variable: milliseconds, 0 for no limit)", _check_seconds, _parse_timeout_milliseconds
)
MILLISECONDS = ValueType("a number above 0 (in a variable: milliseconds)", _check_seconds, _parse_milliseconds)
URL = ValueType("an http:// or https:// URL with a host", _check_url, show=_show_url)
BASE_URL = ValueType(
    "an http:// or https:// URL with a host, no query and no fragment", _check_base_url, _parse_base_url, _show_url
)
TARGET = ValueType("an http:// or https:// URL with a host, or host:port", _check_target, show=_show_url)
HEADERS = ValueType(
    "a mapping of header names to strings of visible ASCII", _check_headers, _parse_headers, _show_headers
)
PATTERNS = ValueType("patterns on module paths: comma-separated or a list of strings", _check_patterns)
FOLDER = ValueType("the path of a folder, there or to be made", _check_folder)
FILE = ValueType("the path of a file that is there", _check_file, show=_show_file)
DETAIL = ValueType('"auto", "all", "off" or a whole number of at least 1', _check_detail, _parse_detail)
GRADIENT_NORMS = ValueType(
    '"auto", True, False or a whole number of at least 1', _check_gradient_norms, _parse_gradient_norms
)
SAMPLER = ValueType("the name of a sampler of OpenTelemetry", _check_sampler, _parse_sampler)
RATIO = ValueType("a number from 0 to 1", _check_ratio, _parse_ratio)
BUDGET = ValueType("a number above 0, at most 1", _check_budget, float)
