"""Where `torchotel stack` keeps what outlives a command, and where it looks for those who train."""

import os
from collections.abc import Mapping
from pathlib import Path


def stack_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Name the folder of this user's stack; it need not be there.

    Raises:
        RuntimeError: This user has no home.
    """
    home = environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "torchotel" / "stack"


def own_targets(folder: Path) -> Path:
    """Name the one that the stack's Prometheus reads where no other was chosen."""
    return folder / "targets"


def stack_targets(environ: Mapping[str, str]) -> Path | None:
    """Give the folder that the stack's Prometheus reads; None where no stack of this user's was ever up."""
    try:
        folder = own_targets(stack_folder(environ))
    except RuntimeError:
        return None
    return folder if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK) else None
