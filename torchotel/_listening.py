"""Who listens on a port of this machine."""

import itertools
import os
from contextlib import suppress
from pathlib import Path

from torchotel._text import cut

MOST_SHOWN = 100
"""Characters of another process's command."""
_LISTENS = "0A"
"""A socket's state in /proc/net/tcp."""
_ADDRESS, _STATE, _UID, _INODE = 1, 3, 7, 9
"""Columns there."""


def owner_of(port: int) -> str | None:
    """Name the process that listens on a port, where /proc tells it."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for columns in map(str.split, Path("/proc/net", table).read_text().splitlines()[1:]):
                if columns[_STATE] == _LISTENS and int(columns[_ADDRESS].rpartition(":")[2], 16) == port:
                    return _process_with(f"socket:[{columns[_INODE]}]") or f"a process of user {columns[_UID]}"
    return None


def _process_with(file: str) -> str | None:
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if any(str(opened.readlink()) == file for opened in (process / "fd").iterdir()):
                words = os.fsdecode((process / "cmdline").read_bytes()).split("\0")[:2]
                # Options, and what follows them, may be passwords.
                shown = itertools.takewhile(lambda word: not word.startswith("-"), words)
                return f"process {process.name} ({cut(' '.join(shown).strip(), MOST_SHOWN)})"
    return None
