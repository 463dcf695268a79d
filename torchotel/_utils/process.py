"""This process: whether it is a child, a task or a fork server, and who owns a port."""

import itertools
import multiprocessing.process
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchotel._utils.text import cut


def is_child() -> bool:
    """Tell whether multiprocessing started this process, also while it runs the user's script again.

    It has no `parent_process()` yet then, but a name of its own already.
    """
    return multiprocessing.parent_process() is not None or multiprocessing.current_process().name != "MainProcess"


def is_being_spawned() -> bool:
    """Tell whether this process is a child of multiprocessing that has not been given its task yet."""
    return is_child() and multiprocessing.parent_process() is None


def when_given_a_task(action: Callable[[], None]) -> None:
    """Run `action` when this process, which is being spawned, gets its task; not where that is a DataLoader's.

    The processes of multiprocessing have no public place for this; where the private one is gone, it runs at once.
    """
    process: Any = multiprocessing.process.BaseProcess
    bootstrap = getattr(process, "_bootstrap", None)
    if bootstrap is None:
        action()
        return

    def begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        process._bootstrap = bootstrap  # noqa: SLF001 - see above
        task = getattr(self, "_target", None)
        if getattr(task, "__module__", None) != "torch.utils.data._utils.worker":
            action()
        return bootstrap(self, *args, **kwargs)

    process._bootstrap = begin  # noqa: SLF001 - see above


def is_fork_server() -> bool:
    """Tell whether this process only forks others for multiprocessing: the program's `__main__` may be run in it."""
    return any(word.startswith("from multiprocessing.forkserver import main") for word in sys.orig_argv)


MAX_SHOWN = 100
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
                return f"process {process.name} ({cut(' '.join(shown).strip(), MAX_SHOWN)})"
    return None
