"""Compare the versions of installed packages with the versions that torchotel supports."""

import platform
import shlex
from collections.abc import Iterable, Iterator
from importlib import metadata
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from torchotel.doctor.result import Finding, failed, ok, warning

SUBJECT = "versions"
SHOWS_COLLECTIVES = SpecifierSet(">=2.14.dev0", prereleases=True)
"""Versions of torch whose process groups have hooks."""
_PREFIX = "opentelemetry-"
_PYTHON = "Python"
_SHOWN = {"torch": "torch", "opentelemetry-sdk": "OpenTelemetry", "prometheus-client": "prometheus_client"}


class _Need(NamedTuple):
    """A requirement without its extras and marker."""

    name: str
    specifier: SpecifierSet


def check() -> Iterator[Finding]:
    """Compare versions with the supported ones, and OpenTelemetry's packages with each other."""
    try:
        own = metadata.metadata("torchotel")
    except metadata.PackageNotFoundError:
        advice = "Install it from its checkout: pip install ."
        yield warning(SUBJECT, "torchotel is not installed, so its requirements are not known", advice)
        return
    needs = [_Need(_PYTHON, SpecifierSet(own["Requires-Python"] or "")), *_needs("torchotel")]
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
        torch = _version("torch")
        if torch is not None and torch not in SHOWS_COLLECTIVES:
            yield ok(SUBJECT, f"torch {torch} does not show its collectives; torch 2.14 and later do")


def _remedy(unmet: Iterable[_Need]) -> str:
    """Return advice to install supported packages; another version of torchotel would not change what is installed."""
    python = [need for need in unmet if need.name == _PYTHON]
    if python:
        return f"Use Python {python[0].specifier}."
    return f"pip install {' '.join(shlex.quote(f'{need.name}{need.specifier}') for need in unmet)}"


def _needs(name: str) -> Iterator[_Need]:
    """Yield the requirements of a distribution that apply here, except those of its extras."""
    for text in metadata.requires(name) or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield _Need(canonicalize_name(requirement.name), requirement.specifier)


def _unmet(need: _Need) -> Iterator[str]:
    version = _version(need.name)
    if version is None:
        yield f"{need.name} is not installed"
        return
    for bound in _broken(need, version):
        yield f"{need.name} is {version}, supported is {bound}"


def _broken(need: _Need, version: str) -> Iterator[str]:
    """Yield the bounds that a version does not satisfy; a pre-release counts as installed."""
    return (str(bound) for bound in need.specifier if not bound.contains(version, prereleases=True))


def _version(name: str) -> str | None:
    if name == _PYTHON:
        return platform.python_version()
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _installed() -> list[str]:
    names = {canonicalize_name(str(found.metadata["Name"])) for found in metadata.distributions()}
    return sorted(name for name in names if name.startswith(_PREFIX))


def _mixed(name: str) -> Iterator[str]:
    """Yield the requirements of an OpenTelemetry package that the others' versions do not satisfy."""
    for need in _needs(name):
        version = _version(need.name) if need.name.startswith(_PREFIX) else None
        if version is not None:
            yield from (f"{need.name}{bound}, which is {version}" for bound in _broken(need, version))


def _pinned() -> list[str]:
    return [need.name for need in _needs("torchotel") if need.name.startswith(_PREFIX)]
