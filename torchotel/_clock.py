"""Time as a parameter, so that tests need not wait for it."""

import time
from typing import Protocol


class Clock(Protocol):
    """Where the time comes from."""

    def monotonic_ns(self) -> int:
        """Nanoseconds that never go back; only differences mean anything."""

    def unix_ns(self) -> int:
        """Nanoseconds since 1970."""


class SystemClock:
    """The machine's clocks; the monotonic one is that of the records, `perf_counter_ns`."""

    def monotonic_ns(self) -> int:
        """Read `time.perf_counter_ns`."""
        return time.perf_counter_ns()

    def unix_ns(self) -> int:
        """Read `time.time_ns`."""
        return time.time_ns()


class ManualClock:
    """A clock that stands still until a test moves it."""

    def __init__(self, monotonic_ns: int = 0, unix_ns: int = 1_700_000_000_000_000_000) -> None:
        self._monotonic_ns = monotonic_ns
        self._unix_ns = unix_ns

    def monotonic_ns(self) -> int:
        """Say where the monotonic clock stands."""
        return self._monotonic_ns

    def unix_ns(self) -> int:
        """Say where the unix clock stands."""
        return self._unix_ns

    def advance(self, seconds: float) -> None:
        """Move both clocks forward."""
        self._monotonic_ns += round(seconds * 1e9)
        self._unix_ns += round(seconds * 1e9)

    def set_unix(self, unix_ns: int) -> None:
        """Put the unix clock anywhere, as a machine's time service does; the monotonic one stays."""
        self._unix_ns = unix_ns
