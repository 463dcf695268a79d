"""Types that every layer uses."""


class ConfigError(ValueError):
    """A bad value of a setting; `instrument()` raises this before it installs anything."""

    def __init__(self, field: str, got: object, takes: str, source: str | None = None) -> None:
        where = f"{field} (from {source})" if source else field
        super().__init__(f"{where}: got {got!r}, takes {takes}")
        self.field = field
        """The name of the setting."""
        self.got = got
        """The bad value."""
        self.takes = takes
        """The values that the setting takes."""


class Unset:
    """The type of UNSET."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "UNSET"

    def __reduce__(self) -> str:
        return "UNSET"  # copying and unpickling return the singleton


UNSET = Unset()
"""Default of an argument: the argument's environment variable is read, then the setting's default is used."""
