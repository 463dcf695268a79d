"""Processes that outlive the command which started them."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

_STOP_S = 30.0
"""For writing down what is in memory."""
_EVERY_S = 0.05
_TAIL_BYTES = 4000


class Process:
    """A server that runs on its own, with its log, the log before and the file of its pid in a folder.

    It holds a lock on that file for as long as it lives, however it ends: a pid alone may be another's by now.

    Args:
        folder: Made where it is not there.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._pid, self.log = folder / "pid", folder / "log"

    @property
    def pid(self) -> int | None:
        """The process that runs; None where none does."""
        with self._pid.open("a+b") as file:
            if _lock(file, fcntl.LOCK_SH):  # several may ask at once
                return None
            file.seek(0)
            return int(file.read() or 0) or None

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start it; does nothing where it runs."""
        with self._pid.open("a+b") as file:
            while not _lock(file, fcntl.LOCK_EX):
                if not _lock(file, fcntl.LOCK_SH):
                    return
                fcntl.flock(file, fcntl.LOCK_UN)
                time.sleep(_EVERY_S)  # somebody asked for the pid, and is done in a moment
            if self.log.exists():
                self.log.replace(self.log.with_name("log.1"))  # it may say why the last one ended
            file.truncate(0)  # nobody may take it for this one's
            with self.log.open("wb") as log:
                started = subprocess.Popen(  # noqa: S603 - the caller says what is run
                    command,
                    env=dict(environ),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # a Ctrl-C in this terminal is not meant for it
                    pass_fds=[file.fileno()],  # the lock goes with it
                )
            file.write(str(started.pid).encode())
            file.flush()
            started.returncode = 0  # it is not ours to wait for; Popen would warn of it

    def stop(self) -> None:
        """End it and wait until it has ended."""
        pid = self.pid
        for number, patience_s in ((signal.SIGTERM, _STOP_S), (signal.SIGKILL, _STOP_S)):
            deadline_s = time.monotonic() + patience_s
            if pid is None:
                return
            with suppress(ProcessLookupError):
                os.kill(pid, number)
            while self.pid is not None and time.monotonic() < deadline_s:
                time.sleep(_EVERY_S)
            pid = self.pid

    def last_words(self) -> str | None:
        """Give the end of the log of a process that has ended; None while it runs."""
        if self.pid is not None:
            return None
        return self.log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace") if self.log.exists() else ""


def _lock(file: BinaryIO, kind: int) -> bool:
    """Lock a file, or tell that another process has it."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
