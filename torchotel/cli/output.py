"""Files that a command writes: whole or not at all, and for their owner alone, like the run that they come from."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from torchotel.report import RunError


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes its place when all is written; where anything fails, nothing has changed.

    Raises:
        RunError: It cannot be written there.
    """
    if path.is_dir():
        raise RunError(f"{path}: is a folder; name a file with -o")
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
def whole_folder(path: Path) -> Iterator[Path]:
    """Give a folder that takes its place, which is empty or not there yet, when all is written.

    Raises:
        RunError: It cannot be written there.
    """
    new = _beside(path)
    try:
        if path.exists() and any(path.iterdir()):
            raise RunError(f"{path}: holds something already; empty it, or choose another folder with -o")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(mode=0o700)
        yield new
        new.replace(path)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); choose another place with -o") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


def owned_file(path: Path) -> BinaryIO:
    """Make a file that only its owner can read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def _beside(path: Path) -> Path:
    absolute = path.absolute()
    return absolute.with_name(f".{absolute.name}.new") if absolute.name else absolute
