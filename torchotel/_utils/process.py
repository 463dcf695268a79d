"""Processes: the script of this one, whether it is a child or traced, who owns a port, and memory."""

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
    """Return whether multiprocessing started this process, also while it imports the program's script.

    A spawned process has no `parent_process()` at that time, but its name is set.
    """
    return multiprocessing.parent_process() is not None or multiprocessing.current_process().name != "MainProcess"


def is_being_spawned() -> bool:
    """Return whether this process is a child of multiprocessing that has not received its task yet."""
    return is_child() and multiprocessing.parent_process() is None


def when_given_a_task(action: Callable[[], None]) -> None:
    """Run `action` when this spawned process receives its task, unless the task is a DataLoader's worker.

    multiprocessing has no public hook for this. If `BaseProcess._bootstrap` is missing, `action` runs at once.
    """
    process: Any = multiprocessing.process.BaseProcess
    bootstrap = getattr(process, "_bootstrap", None)
    if bootstrap is None:
        action()
        return

    def begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        process._bootstrap = bootstrap  # noqa: SLF001  # no public hook
        task = getattr(self, "_target", None)
        if getattr(task, "__module__", None) != "torch.utils.data._utils.worker":
            action()
        return bootstrap(self, *args, **kwargs)

    process._bootstrap = begin  # noqa: SLF001  # no public hook


def is_fork_server() -> bool:
    """Return whether this process is a fork server of multiprocessing, which may run the program's `__main__`."""
    return any(word.startswith("from multiprocessing.forkserver import main") for word in sys.orig_argv)


def is_traced() -> bool:
    """Return whether a debugger or a measurement of coverage runs in this process."""
    if sys.gettrace() is not None:
        return True
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on
    return monitoring is not None and any(map(monitoring.get_tool, (monitoring.DEBUGGER_ID, monitoring.COVERAGE_ID)))


MAX_PORT = 65_535
MAX_SHOWN = 100
"""Characters of another process's command line."""
_LISTENS = "0A"
"""State of a listening socket in /proc/net/tcp."""
_ADDRESS, _STATE, _UID, _INODE = 1, 3, 7, 9
"""Columns of /proc/net/tcp."""


def owner_of(port: int) -> str | None:
    """Return a description of the process that listens on a port; None if /proc does not show it."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for columns in map(str.split, Path("/proc/net", table).read_text().splitlines()[1:]):
                if columns[_STATE] == _LISTENS and int(columns[_ADDRESS].rpartition(":")[2], 16) == port:
                    return _process_with(f"socket:[{columns[_INODE]}]") or f"a process of user {columns[_UID]}"
    return None


def _process_with(file: str) -> str | None:
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended or belongs to another user
            if any(str(opened.readlink()) == file for opened in (process / "fd").iterdir()):
                words = os.fsdecode((process / "cmdline").read_bytes()).split("\0")[:2]
                # Options and their values may be passwords.
                shown = itertools.takewhile(lambda word: not word.startswith("-"), words)
                return f"process {process.name} ({cut(' '.join(shown).strip(), MAX_SHOWN)})"
    return None


def resident_bytes(pid: int) -> int | None:
    """Return the resident memory of a process; None if the system does not show it."""
    with suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None


def script_name() -> str:
    """Return the script's name without folder and ending, or the module's name as given to `python -m`."""
    path = sys.argv[0] if sys.argv else ""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if path and spec is not None and spec.origin == path:  # else it is that of a profiler, which runs a script
        return str(spec.name).removesuffix(".__main__")
    name = Path(path).name.removesuffix(".py")
    return name if name not in {"", "-", "-c"} else "python"
