"""All checks, in the order in which they are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from torchotel.doctor import settings, versions
from torchotel.doctor.clock import Steadiness
from torchotel.doctor.result import Finding, failed


def examine(
    given: Mapping[str, Any],
    environ: Mapping[str, str],
    model: str | None,
    inputs: Sequence[tuple[tuple[int, ...], str]],
) -> Iterator[Finding]:
    """Check one thing after the other.

    Args:
        given: Settings that were said.
        environ: Variables.
        model: Where a model is found, as `module:name`; None: none is tried.
        inputs: Shape and dtype of each of its inputs.

    Raises:
        ConfigError: A setting that was said is bad.
    """
    steadiness = Steadiness()
    config, findings = settings.read(given, environ)
    yield from _guarded("versions", versions.check)
    yield from _guarded("variables", lambda: _part("otel_environment").check_variables(environ))
    yield from findings
    yield from _guarded("settings", lambda: _part("settings").check_contradictions(config, given, environ))
    yield from _guarded("settings", lambda: _part("settings").check_sdk_exporters(environ))
    yield from _guarded("spans", lambda: _part("otel_environment").check_providers(config))
    yield from _guarded("endpoint", lambda: _part("endpoint").check(config))
    yield from _guarded("prometheus", lambda: _part("local").check_port(config, environ))
    yield from _guarded("stack", lambda: _part("local").check_stack(config, environ))
    yield from _guarded("folders", lambda: _part("local").check_folders(config, environ))
    if model is not None:
        yield from _guarded("model", lambda: _part("model").check(config, model, inputs))
    yield from _guarded("clock", steadiness.check)


def _part(name: str) -> Any:
    """Load a check, which may depend on what is broken."""
    return import_module(f"torchotel.doctor.{name}")


def _guarded(subject: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Go on with the next check where one breaks."""
    try:
        yield from check()
    except Exception as error:  # noqa: BLE001 - one broken part must not hide the others
        text = f"could not be checked: {type(error).__name__}: {error}"
        advice = "If a library cannot be loaded, check its version above. Otherwise report this error."
        yield failed(subject, text, advice)
