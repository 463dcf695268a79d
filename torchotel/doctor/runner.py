"""Run all checks, in the order of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from torchotel.doctor import settings, versions
from torchotel.doctor.clock import ClockCheck
from torchotel.doctor.result import Finding, failed


def run_checks(
    explicit: Mapping[str, Any],
    environ: Mapping[str, str],
    model: str | None,
    inputs: Sequence[tuple[tuple[int, ...], str]],
) -> Iterator[Finding]:
    """Yield the findings of all checks.

    Args:
        explicit: Settings from the command line.
        environ: Environment variables.
        model: Model to run for one step, as `module:name`; None: no model is checked.
        inputs: Shape and dtype of each input of the model.

    Raises:
        ConfigError: A setting from the command line is invalid.
    """
    clock_check = ClockCheck()
    config, findings = settings.read(explicit, environ)
    yield from _guarded("versions", versions.check)
    yield from _guarded("variables", lambda: _load_checks("otel_environment").check_variables(environ))
    yield from findings
    yield from _guarded("settings", lambda: _load_checks("settings").check_contradictions(config, explicit, environ))
    yield from _guarded("settings", lambda: _load_checks("settings").check_sdk_exporters(environ))
    yield from _guarded("spans", lambda: _load_checks("otel_environment").check_providers(config))
    yield from _guarded("endpoint", lambda: _load_checks("endpoint").check(config))
    yield from _guarded("prometheus", lambda: _load_checks("local").check_port(config, environ))
    yield from _guarded("stack", lambda: _load_checks("local").check_stack(config, environ))
    yield from _guarded("worker", lambda: _load_checks("local").check_worker(config))
    yield from _guarded("overhead", lambda: _load_checks("local").check_overhead(config))
    yield from _guarded("folders", lambda: _load_checks("local").check_folders(config, environ))
    if model is not None:
        yield from _guarded("model", lambda: _load_checks("model").check(config, model, inputs))
    yield from _guarded("clock", clock_check.check)


def _load_checks(name: str) -> Any:
    """Import a module of checks when it is needed, since it may depend on a broken library."""
    return import_module(f"torchotel.doctor.{name}")


def _guarded(subject: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Report an exception of a check as a finding, and continue with the next check."""
    try:
        yield from check()
    except Exception as error:  # noqa: BLE001 - one broken check must not stop the others
        text = f"could not be checked: {type(error).__name__}: {error}"
        advice = "If a library cannot be loaded, check its version above. Otherwise report this error."
        yield failed(subject, text, advice)
