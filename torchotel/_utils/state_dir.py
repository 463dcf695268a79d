"""Find the folders of `torchotel stack`: its state, and the scrape targets of training processes."""

import os
from collections.abc import Mapping
from pathlib import Path


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
