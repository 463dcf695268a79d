"""Versions: what is installed, against what is needed."""

import platform
import re
import shlex
from collections.abc import Iterable, Iterator
from importlib import metadata
from typing import NamedTuple

from torchotel.doctor.result import Finding, failed, ok, warning

SUBJECT = "versions"
_PREFIX = "opentelemetry-"
_PYTHON = "Python"
_SHOWN = {"torch": "torch", "opentelemetry-sdk": "OpenTelemetry", "prometheus-client": "prometheus_client"}
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_BOUND = re.compile(r"(==|>=|~=|<)\s*([\w.+!]+)")


class _Need(NamedTuple):
    """A requirement as far as it is looked at."""

    name: str
    bounds: tuple[tuple[str, str], ...]
    """As ("==", "1.45.1")."""


def check() -> Iterator[Finding]:
    """Compare with the supported minimums, and OpenTelemetry's packages with each other."""
    try:
        own = metadata.metadata("torchotel")
    except metadata.PackageNotFoundError:
        advice = "Install it from its checkout: pip install ."
        yield warning(SUBJECT, "torchotel is not installed, so its requirements are not known", advice)
        return
    needs = [_Need(_PYTHON, _bounds(own["Requires-Python"] or "")), *_needs("torchotel")]
    unmet = {need: texts for need in needs if (texts := list(_unmet(need)))}
    complaints = [text for texts in unmet.values() for text in texts]
    if complaints:
        yield failed(SUBJECT, "; ".join(complaints), _remedy(unmet))
    mixed = [f"{name} needs {text}" for name in _installed() for text in _mixed(name)]
    if mixed:
        advice = "Install packages of one OpenTelemetry release: pip install --upgrade " + " ".join(_pinned())
        yield failed(SUBJECT, "OpenTelemetry's packages are of several releases: " + "; ".join(mixed), advice)
    if not complaints and not mixed:
        shown = (f"{word} {_version(name)}" for name, word in _SHOWN.items())
        python = f"Python {platform.python_version()}"
        yield ok(SUBJECT, ", ".join((f"torchotel {_version('torchotel')}", python, *shown)))


def _remedy(unmet: Iterable[_Need]) -> str:
    """Advise to install what is supported: another version of torchotel would not change what is installed."""
    python = [need for need in unmet if need.name == _PYTHON]
    if python:
        return f"Use Python {_specifier(python[0])}."
    return f"pip install {' '.join(shlex.quote(need.name + _specifier(need)) for need in unmet)}"


def _specifier(need: _Need) -> str:
    return ",".join(f"{sign}{bound}" for sign, bound in need.bounds)


def _needs(name: str) -> Iterator[_Need]:
    """List what a distribution requires, its extras left out."""
    for text in metadata.requires(name) or ():
        requirement, _, marker = text.partition(";")
        if "extra" not in marker and (found := _NAME.match(requirement)):
            yield _Need(found[0].lower(), _bounds(requirement))


def _bounds(text: str) -> tuple[tuple[str, str], ...]:
    return tuple((found[1], found[2]) for found in _BOUND.finditer(text))


def _unmet(need: _Need) -> Iterator[str]:
    version = _version(need.name)
    if version is None:
        yield f"{need.name} is not installed"
        return
    for sign, bound in need.bounds:
        if not _holds(version, sign, bound):
            yield f"{need.name} is {version}, supported is {sign}{bound}"


def _holds(version: str, sign: str, bound: str) -> bool:
    if sign == "==":
        return version == bound
    own, other = _numbers(version), _numbers(bound)
    if sign == "~=" and own[: len(other) - 1] != other[:-1]:
        return False
    return (own >= other) == (sign != "<")


def _numbers(version: str) -> tuple[int, ...]:
    """Read `2.14.1+cpu` as (2, 14, 1); a release to come counts as its release."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else ()


def _version(name: str) -> str | None:
    if name == _PYTHON:
        return platform.python_version()
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _installed() -> list[str]:
    names = {str(found.metadata["Name"]).lower().replace("_", "-") for found in metadata.distributions()}
    return sorted(name for name in names if name.startswith(_PREFIX))


def _mixed(name: str) -> Iterator[str]:
    """Tell what one of OpenTelemetry's packages asks of another that does not hold."""
    for need in _needs(name):
        version = _version(need.name)
        for sign, bound in need.bounds:
            if version is not None and need.name.startswith(_PREFIX) and not _holds(version, sign, bound):
                yield f"{need.name}{sign}{bound}, which is {version}"


def _pinned() -> list[str]:
    return [need.name for need in _needs("torchotel") if need.name.startswith(_PREFIX)]
