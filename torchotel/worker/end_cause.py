"""Why a training process ended without a shutdown: only what the system or `faulthandler` has recorded, no guesses."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Final

from torchotel._records import PROCESS_ENDED_TYPE, Error
from torchotel._utils.text import shortened
from torchotel.worker.stall_watch import MAX_STACK_BYTES, frames_of, signal_masks

PROCESS_ENDED: Final = Error(PROCESS_ENDED_TYPE, "The training process ended without a shutdown of torchotel")
OOM_KILL: Final = Error("oom_kill", "The system killed a process of this cgroup because its memory was exhausted")

_SIGNALS: Final = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating point exception": "SIGFPE",
    "Floating-point exception": "SIGFPE",  # later versions of Python
    "Illegal instruction": "SIGILL",
}
"""What `faulthandler` calls each signal: https://github.com/python/cpython/blob/3.11/Modules/faulthandler.c."""
_NUMBERS: Final = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_FATAL: Final = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_OOM_KILLS: Final = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class _MemoryFile:
    """The file of `faulthandler`, which holds the only reference: another file closes this one."""

    def __init__(self) -> None:
        self._fd = -1
        self._fd = os.memfd_create("faulthandler")

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._fd

    def flush(self) -> None:
        """Do nothing: `faulthandler` calls it once."""

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class FatalSignals:
    """Let `faulthandler` write a fatal signal and its stack to a memory file, unless the program handles such signals.

    `faulthandler` then stays enabled: to disable it would undo handlers that the program has set since.

    Raises:
        OSError: The system has no memory files, or too many files are open.
    """

    last_file: ClassVar[weakref.ref[_MemoryFile] | None] = None
    """The last file that `faulthandler` got here; the program closes it by naming another one."""

    def __init__(self) -> None:
        self._file: weakref.ref[_MemoryFile] | None = None
        last = FatalSignals.last_file
        is_own = last is not None and last() is not None
        if is_own or not (faulthandler.is_enabled() or _handles_fatal_signals()):
            self._file = _enable()

    @property
    def fd(self) -> int | None:
        """The descriptor of the memory file; None if the program handles fatal signals."""
        file = None if self._file is None else self._file()
        return None if file is None else file.fileno()

    def close(self) -> None:
        """Let `faulthandler` write to another memory file, also in a forked child, unless the program has named one."""
        if self.fd is not None:
            _enable()


def _enable() -> weakref.ref[_MemoryFile]:
    """Enable `faulthandler` with a new file, or let it write to a new file instead of the present one."""
    file = _MemoryFile()
    faulthandler.enable(file, all_threads=False)
    reference = FatalSignals.last_file = weakref.ref(file)
    return reference


def _handles_fatal_signals() -> bool:
    """Return whether the process handles one of the signals, as the library of a Java VM does."""
    caught = signal_masks("self").get("Cgt", 0)
    return any(caught >> (number - 1) & 1 for number in _NUMBERS)


class EndCause:
    """Find the cause of the end of the training process, in the companion process.

    Args:
        signals_fd: The descriptor of the file of `FatalSignals`; None without one.
        with_place: Whether the message has the innermost line of the stack.
    """

    def __init__(self, signals_fd: int | None, *, with_place: bool) -> None:
        self._signals_fd, self._with_place = signals_fd, with_place
        self._oom_kills = self._latest_oom_kills = _oom_kills()

    def refresh(self) -> None:
        """Note the kills so far, about once a second: those before the last two seconds are no cause of an end."""
        self._oom_kills, self._latest_oom_kills = self._latest_oom_kills, _oom_kills()

    def find(self) -> Error:
        """Return the signal that `faulthandler` wrote, "oom_kill", or "process_ended" if the cause is unknown."""
        return self._signal() or (OOM_KILL if _oom_kills() > self._oom_kills else PROCESS_ENDED)

    def _signal(self) -> Error | None:
        if self._signals_fd is None:
            return None
        text = os.pread(self._signals_fd, MAX_STACK_BYTES, 0).decode(errors="replace")
        fatal, frames = _FATAL.search(text), frames_of(text)
        if fatal is None or fatal[1] not in _SIGNALS:
            return None
        return Error(_SIGNALS[fatal[1]], shortened(str(frames[0])) if frames and self._with_place else "")


def _oom_kills() -> int:
    """Return how many processes of this cgroup were killed for lack of memory; 0 if that is unknown."""
    for path in _memory_event_files():
        try:
            found = _OOM_KILLS.search(path.read_text())
        except (OSError, UnicodeDecodeError):
            continue
        if found is not None:
            return int(found[1])
    return 0


def _memory_event_files() -> Iterator[Path]:
    """Name the files that may count kills, of both versions of cgroups (https://man7.org/linux/man-pages/man7/cgroups.7.html)."""
    try:
        lines = _OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, cgroup = line.split(":", 2)
        # In a container the process's own cgroup may be the root of the mount.
        for folder in (cgroup.strip("/"), ""):
            if not controllers:
                yield _CGROUPS / folder / "memory.events"
            elif "memory" in controllers.split(","):
                yield _CGROUPS / "memory" / folder / "memory.oom_control"
