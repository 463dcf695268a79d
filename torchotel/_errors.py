"""The one error that torchotel raises into a user's program."""


class ConfigError(ValueError):
    """Say which setting is wrong, what it got, what it takes; raised by `instrument()` before anything is installed."""

    def __init__(self, field: str, got: object, takes: str, source: str | None = None) -> None:
        where = f"{field} (from {source})" if source else field
        super().__init__(f"{where}: got {got!r}, takes {takes}")
        self.field = field
        self.got = got
        self.takes = takes
