"""Write to a terminal: width, colours, progress, and files that are written whole or not at all."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, TextIO

from torchotel._utils.text import Output, printable
from torchotel.runs import RunError


def add_force(parser: argparse.ArgumentParser) -> None:
    """Declare --force."""
    parser.add_argument("--force", action="store_true", help="overwrite existing files")


@contextmanager
def whole_file(path: Path, *, force: bool) -> Iterator[BinaryIO]:
    """Open a file that takes its place when all is written; where anything fails, nothing has changed.

    Args:
        path: Of the file.
        force: Whether a file that is there already is overwritten.

    Raises:
        RunError: It cannot be written there.
    """
    if path.is_dir():
        raise RunError(f"{path}: is a folder; name a file with -o")
    if path.exists() and not force:
        raise _is_there(path)
    new = _beside(path)
    try:
        new.unlink(missing_ok=True)
        with owned_file(new) as file:
            yield file
        new.replace(path)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); choose another place with -o") from error
    finally:
        new.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path, pattern: str, *, force: bool) -> Iterator[Path]:
    """Give a folder that takes its place when all is written.

    Args:
        path: Of the folder; it may be there already if it is empty.
        pattern: Names of the files that are written to it.
        force: Whether a folder is replaced that holds such files and nothing else.

    Raises:
        RunError: It cannot be written there.
    """
    new = _beside(path)
    try:
        old = list(path.iterdir()) if path.exists() else []
        if not all(file.match(pattern) for file in old):
            raise RunError(f"{path}: contains other files; choose another folder with -o")
        if old and not force:
            raise _is_there(path)
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(mode=0o700)
        yield new
        for file in old:
            file.unlink()
        new.replace(path)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); choose another place with -o") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


def owned_file(path: Path) -> BinaryIO:
    """Make a file that only its owner can read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def _is_there(path: Path) -> RunError:
    return RunError(f"{path}: already exists; overwrite it with --force or choose another place with -o")


def _beside(path: Path) -> Path:
    absolute = path.absolute()
    return absolute.with_name(f".{absolute.name}.new") if absolute.name else absolute


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


class Terminal(Output):
    """Format text for a stream: fitted, wrapped and coloured on a terminal, plain in a file or a pipe.

    COLUMNS sets the width of a terminal. NO_COLOR (https://no-color.org) switches colours off, FORCE_COLOR
    (https://force-color.org) on, else TERM=dumb off.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        stream = stream or sys.stdout
        is_terminal = stream.isatty()
        self.width = shutil.get_terminal_size().columns if is_terminal else None
        self.has_unicode = is_terminal and (stream.encoding or "").lower().startswith("utf")
        self._has_colours = not os.environ.get("NO_COLOR") and bool(
            os.environ.get("FORCE_COLOR") or (is_terminal and os.environ.get("TERM") != "dumb")
        )

    def colour(self, text: str, code: str) -> str:
        """Colour a text if colours are on."""
        return f"\x1b[{code}m{text}\x1b[0m" if self._has_colours and text else text

    def wrap(self, text: str, indent: str = "") -> Sequence[str]:
        """Wrap a line to the width; further lines begin with `indent`.

        Words are never broken, so that URLs and commands can be copied.
        """
        if self.width is None:
            return [text]
        return textwrap.wrap(
            text, self.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        ) or [text]
