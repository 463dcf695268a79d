"""One setting: the variables that it is read from, and how a bad value is told."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torchotel._errors import ConfigError
from torchotel._kinds import Kind
from torchotel._unset import UNSET
from torchotel._utils.faults import warn_once

OTEL_PREFIX = "OTEL_"
"""Of variables that other programs read too."""


class Setting(NamedTuple):
    """How a field is read and checked."""

    kind: Kind
    variables: tuple[str, ...]
    """The first one that is set, to something that is ours, wins."""
    default: object = None
    """Of the field: what holds where its variables say nothing."""

    def checked(self, name: str, value: object) -> Any:
        """Give the value in its one form, or raise ConfigError."""
        try:
            return self.kind.check(value)
        except (ValueError, TypeError):
            raise ConfigError(name, self.kind.show(value), self.kind.takes) from None

    def read(self, name: str, environ: Mapping[str, str]) -> Any:
        """Read the field from its variables; UNSET if none is set to a value that can be read.

        A bad value of OpenTelemetry's variables is ignored with a warning, since it may be meant for another program
        (https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/#parsing-empty-value).

        Raises:
            ConfigError: A variable of torchotel's own has a bad value.
        """
        # OpenTelemetry: an empty variable is one that is not set.
        present = ((variable, environ.get(variable, "").strip()) for variable in self.variables)
        value, not_ours = UNSET, {}
        for variable, text in present:
            ours = self.kind.ours(text)
            if ours.lower() != text.lower():
                not_ours[variable] = text
            if ours and (value := self._read(name, ours, variable)) is not UNSET:
                break
        for variable, text in not_ours.items():
            used = self.default if value is UNSET else value
            shown = ",".join(used) if isinstance(used, tuple) else used
            warn_once("%s: torchotel does not take %r, and uses %r", variable, text, shown)
        return value

    def _read(self, name: str, text: str, variable: str) -> Any:
        try:
            return self.kind.check(self.kind.parse(text))
        except (ValueError, TypeError):
            if not variable.startswith(OTEL_PREFIX):
                raise ConfigError(name, self.kind.show(text), self.kind.takes, variable) from None
            counts = "is ignored" if self.kind.otherwise is UNSET else f"counts as {self.kind.otherwise}"
            warn_once("%s %s: got %r, takes %s", variable, counts, self.kind.show(text), self.kind.takes)
            return self.kind.otherwise


def env(kind: Kind, *variables: str) -> Setting:
    """Read the first of some variables; without any it is an argument only."""
    return Setting(kind, variables)


def otlp(kind: Kind, name: str, *, signal: str = "TRACES") -> Setting:
    """Read the variable of a signal, else the general one."""
    return Setting(kind, (f"OTEL_EXPORTER_OTLP_{signal}_{name}", f"OTEL_EXPORTER_OTLP_{name}"))
