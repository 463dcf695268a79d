"""Types that every layer uses."""


class ConfigError(ValueError):
    """Say which setting is wrong, what it got, what it takes; raised by `instrument()` before anything is installed."""

    def __init__(self, field: str, got: object, takes: str, source: str | None = None) -> None:
        where = f"{field} (from {source})" if source else field
        super().__init__(f"{where}: got {got!r}, takes {takes}")
        self.field = field
        self.got = got
        self.takes = takes


class Unset:
    """The type of UNSET."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "UNSET"

    def __reduce__(self) -> str:
        return "UNSET"  # copies are the same one


UNSET = Unset()
"""The argument's variable is read, and only then comes its default."""
