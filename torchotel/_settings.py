"""One setting: the variables that it is read from, and how a bad value is told."""

import enum
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from torchotel._errors import ConfigError
from torchotel._kinds import Kind


class Unset(enum.Enum):
    """The type of UNSET."""

    UNSET = "unset"

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset.UNSET
"""Stands for an argument that was left out: its variable is read, and only then comes the default."""


class Setting(NamedTuple):
    """How a field is read and checked."""

    kind: Kind
    variables: tuple[str, ...]
    """The first one that is set wins."""

    def checked(self, name: str, value: object) -> Any:
        """Give the value in its one form, or raise ConfigError."""
        try:
            return self.kind.check(value)
        except (ValueError, TypeError):
            raise ConfigError(name, self.kind.show(value), self.kind.takes) from None

    def read(self, name: str, environ: Mapping[str, str]) -> Any:
        """Read the field from its variables; UNSET where none is set."""
        # OpenTelemetry: an empty variable is one that is not set.
        source = next((variable for variable in self.variables if environ.get(variable, "").strip()), None)
        if source is None:
            return UNSET
        text = environ[source].strip()
        try:
            return self.kind.check(self.kind.parse(text))
        except (ValueError, TypeError):
            raise ConfigError(name, self.kind.show(text), self.kind.takes, source) from None


def env(kind: Kind, *variables: str) -> Setting:
    """Read the first of some variables; without any it is an argument only."""
    return Setting(kind, variables)


def otlp(kind: Kind, name: str, *, signal: str = "TRACES") -> Setting:
    """Read the variable of a signal, else the general one."""
    return Setting(kind, (f"OTEL_EXPORTER_OTLP_{signal}_{name}", f"OTEL_EXPORTER_OTLP_{name}"))
