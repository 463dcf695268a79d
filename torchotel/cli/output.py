"""Files that a command writes: whole or not at all, and for their owner alone, like the run that they come from."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

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
