"""Say on a terminal how far a long command is."""

import sys
import time
from types import TracebackType
from typing import Self, TextIO

from torchotel._text import printable

_EVERY_S = 0.1
_CLEAR = "\r\x1b[K"


class Progress:
    """Show one line that changes, on a terminal only; it is gone at the end, whatever happens.

    Args:
        whole: How much there is to do, in any unit.
        stream: Where it is shown; standard error where nothing else is said.
    """

    def __init__(self, whole: int, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._shown = self._stream.isatty()
        self._whole = max(1, whole)
        self._done = 0
        self._what = ""
        self._next_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            self._stream.write(_CLEAR)
            self._stream.flush()

    def begin(self, what: str) -> None:
        """Say what is done from now on."""
        self._what = printable(what)
        self._show()

    def advance(self, done: int) -> None:
        """Count what was done since the last call."""
        self._done += done
        if self._shown and time.monotonic() >= self._next_s:
            self._show()

    def _show(self) -> None:
        if self._shown:
            share = min(1.0, self._done / self._whole)
            self._stream.write(f"{_CLEAR}{self._what} {share:.0%}")
            self._stream.flush()
            self._next_s = time.monotonic() + _EVERY_S
