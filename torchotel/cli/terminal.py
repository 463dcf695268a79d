"""Write to a terminal, with width, colours and progress, and write files atomically."""

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
def atomic_file(path: Path, *, force: bool) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` at the end of the block; if the block raises, nothing is changed.

    Args:
        path: Path of the file.
        force: Overwrite an existing file.

    Raises:
        RunError: The file exists, or cannot be written.
    """
    if path.is_dir():
        raise RunError(f"{path}: is a folder; name a file with -o")
    if path.exists() and not force:
        raise _exists_error(path)
    new = _temporary_path(path)
    try:
        new.unlink(missing_ok=True)
        with private_file(new) as file:
            yield file
        new.replace(path)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); choose another place with -o") from error
    finally:
        new.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path, pattern: str, *, force: bool) -> Iterator[Path]:
    """Create a folder that replaces `path` at the end of the block; if the block raises, nothing is changed.

    Args:
        path: Path of the folder, which may exist if it is empty.
        pattern: Pattern of the names of files that the block writes.
        force: Replace an existing folder that contains such files only.

    Raises:
        RunError: The folder has other content, or cannot be written.
    """
    new = _temporary_path(path)
    try:
        old = list(path.iterdir()) if path.exists() else []
        if not all(file.match(pattern) for file in old):
            raise RunError(f"{path}: contains other files; choose another folder with -o")
        if old and not force:
            raise _exists_error(path)
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


def private_file(path: Path) -> BinaryIO:
    """Create a file that only its owner can read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def _exists_error(path: Path) -> RunError:
    return RunError(f"{path}: already exists; overwrite it with --force or choose another place with -o")


def _temporary_path(path: Path) -> Path:
    absolute = path.absolute()
    return absolute.with_name(f".{absolute.name}.new") if absolute.name else absolute


_UPDATE_INTERVAL_S = 0.1
_CLEAR_LINE = "\r\x1b[K"


class Progress:
    """Show progress in one line of a terminal; the line is removed at the end of the block.

    Args:
        total: Amount of work, in any unit.
        stream: Terminal; by default standard error.
    """

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._shown = self._stream.isatty()
        self._total = max(1, total)
        self._done = 0
        self._task = ""
        self._next_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            self._stream.write(_CLEAR_LINE)
            self._stream.flush()

    def begin(self, task: str) -> None:
        """Set the name of the current task."""
        self._task = printable(task)
        self._show()

    def advance(self, done: int) -> None:
        """Add to the amount of work that is done."""
        self._done += done
        if self._shown and time.monotonic() >= self._next_s:
            self._show()

    def _show(self) -> None:
        if self._shown:
            share = min(1.0, self._done / self._total)
            self._stream.write(f"{_CLEAR_LINE}{self._task} {share:.0%}")
            self._stream.flush()
            self._next_s = time.monotonic() + _UPDATE_INTERVAL_S


class Terminal(Output):
    """Format text for a stream: fitted, wrapped and coloured for a terminal, plain for a file or a pipe.

    COLUMNS sets the width of a terminal. NO_COLOR (https://no-color.org) switches colours off and FORCE_COLOR
    (https://force-color.org) on; without either, TERM=dumb switches them off.
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
        """Return the text with a colour code, if colours are on."""
        return f"\x1b[{code}m{text}\x1b[0m" if self._has_colours and text else text

    def wrap(self, text: str, indent: str = "") -> Sequence[str]:
        """Wrap a line to the terminal's width; further lines begin with `indent`.

        Words are never broken, so that URLs and commands can be copied.
        """
        if self.width is None:
            return [text]
        return textwrap.wrap(
            text, self.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        ) or [text]


def layers_to_show(text: str) -> int:
    """Read the option of the number of layers that a table shows.

    Raises:
        argparse.ArgumentTypeError: The text is not a number of at least 1.
    """
    if not text.isdecimal() or int(text) < 1:
        message = f"{text!r} is not a whole number of at least 1"
        raise argparse.ArgumentTypeError(message)
    return int(text)
