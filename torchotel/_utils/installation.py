"""The installed version of torchotel, and the folders of `torchotel stack`."""

import os
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


@cache  # reads and parses a file
def package_version() -> str:
    """Return the installed version of torchotel."""
    try:
        return version("torchotel")
    except PackageNotFoundError:  # a source checkout
        return "0.0.0"


def stack_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of this user's stack, which may not exist.

    Raises:
        RuntimeError: The user has no home folder.
    """
    home = environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "torchotel" / "stack"


def own_targets(folder: Path) -> Path:
    """Return the default folder of scrape targets in a stack's folder."""
    return folder / "targets"


def stack_targets(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of targets that the stack's Prometheus reads; None if this user never started a stack."""
    try:
        folder = own_targets(stack_folder(environ))
    except RuntimeError:
        return None
    return folder if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK) else None
