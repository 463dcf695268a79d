"""Settings: every variable that cannot be read, and what reading them warns of."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, NamedTuple, cast

from torchotel._config import Config
from torchotel._errors import ConfigError
from torchotel._settings import Setting
from torchotel.doctor.finding import Finding, failed, ok, warning

SUBJECT = "settings"
PREFIX = "TORCHOTEL_"
_DISABLED = "OTEL_SDK_DISABLED"


class Read(NamedTuple):
    """Settings without what could not be read, and findings about that."""

    config: Config
    findings: list[Finding]


def read(given: Mapping[str, Any], environ: Mapping[str, str]) -> Read:
    """Read the settings as `instrument()` does, going on without each variable that it would raise for.

    Raises:
        ConfigError: Something given is bad, which is a wrong use of the command.
    """
    findings: list[Finding] = []
    # The other variables are looked at all the same; unknown ones of ours are the subject of `variables`.
    known = known_variables()
    left = {
        name: value
        for name, value in environ.items()
        if name != _DISABLED and (name in known or not name.startswith(PREFIX))
    }
    if environ.get(_DISABLED, "").strip().lower() == "true":
        advice = f"Unset {_DISABLED}. The other checks ignore it."
        findings.append(
            warning(SUBJECT, f"{_DISABLED} is true: nothing is recorded, and instrument() does nothing", advice)
        )
    told: list[str] = []  # in all rounds: each warning is logged once
    while True:
        with _warnings(told):
            try:
                config = Config.read(given, left)
            except ConfigError as error:
                bad = [name for name in variables_of()[error.field] if name in left]
                if error.field in given or not bad:
                    raise
                advice = f"instrument() raises ConfigError for it. Correct or unset {' and '.join(bad)}."
                findings.append(failed(SUBJECT, str(error), advice))
                for name in bad:
                    del left[name]
                continue
        break
    findings += (warning(SUBJECT, text, "Correct the variable, or unset it.") for text in dict.fromkeys(told))
    return Read(config, findings or [ok(SUBJECT, "all settings are valid")])


def variables_of() -> dict[str, tuple[str, ...]]:
    """Give the variables that each field is read from."""
    settings = {found.name: cast("Any", found.type).__metadata__[0] for found in fields(Config)}
    return {name: setting.variables for name, setting in settings.items() if isinstance(setting, Setting)}


def known_variables() -> set[str]:
    """List every variable that is read as a setting."""
    return {name for names in variables_of().values() for name in names}


@contextmanager
def _warnings(told: list[str]) -> Iterator[None]:
    """Collect what torchotel would log."""
    logger, handler = logging.getLogger("torchotel"), logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]  # less than a class
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
