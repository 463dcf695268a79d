"""All checks, in the order in which they are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from torchotel.doctor import settings, versions
from torchotel.doctor.finding import Finding, failed


def examine(
    given: Mapping[str, Any], environ: Mapping[str, str], model: str | None, inputs: Sequence[str]
) -> Iterator[Finding]:
    """Check one thing after the other.

    Args:
        given: Settings that were said.
        environ: Variables.
        model: Where a model is found, as `module:name`.
        inputs: Shapes of its inputs.

    Raises:
        ConfigError: A setting that was said is bad.
    """
    config, findings = settings.read(given, environ)
    yield from _guarded("versions", versions.check)
    yield from findings
    yield from _guarded("endpoint", lambda: _part("endpoint").check(config))


def _part(name: str) -> Any:
    """Load a check, which may depend on what is broken."""
    return import_module(f"torchotel.doctor.{name}")


def _guarded(subject: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Go on with the next check where one breaks."""
    try:
        yield from check()
    except Exception as error:  # noqa: BLE001 - one broken part must not hide the others
        advice = (
            "Where a library cannot be loaded, see its version above; else this is torchotel's own error: report it."
        )
        yield failed(subject, f"could not be checked: {type(error).__name__}: {error}", advice)
