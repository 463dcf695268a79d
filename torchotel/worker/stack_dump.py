"""The stack of the training thread, which `faulthandler` writes at a signal, also while C code holds the GIL."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time
from pathlib import Path
from typing import ClassVar, Final, NamedTuple, TypeAlias

from torchotel.worker.status_page import PageReader

MAX_STACK_BYTES: Final = 1 << 16
_FRAME: Final = re.compile(r'^  File "(.*)", line (\d+) in (.+)$', re.MULTILINE)
_MASKS: Final = re.compile(r"^Sig(Cgt|Ign|Blk):\s*([0-9a-f]+)$", re.MULTILINE)
_MAX_SHOWN_FRAMES: Final = 3
_POLL_S: Final = 0.01
_MAX_WAIT_S: Final = 1.0

Masks: TypeAlias = dict[str, int]
"""The signals that a process catches ("Cgt"), ignores ("Ign") and blocks ("Blk"), as bits."""


class Frame(NamedTuple):
    """A frame of a stack."""

    path: str
    line: int
    function: str

    def __str__(self) -> str:
        return f'File "{Path(self.path).name}", line {self.line} in {self.function}'  # a path may have a user's name


def frames_of(text: str) -> list[Frame]:
    """Return the frames in a text of `faulthandler`, the innermost first."""
    return [Frame(path, int(line), function) for path, line, function in _FRAME.findall(text)]


def describe_frames(frames: list[Frame]) -> str:
    """Return the innermost frames in one line."""
    return ", called from ".join(map(str, frames[:_MAX_SHOWN_FRAMES]))


def signal_masks(pid: int | str) -> Masks:
    """Return the signals that a process catches, ignores and blocks; empty if that is unknown."""
    try:
        return {name: int(mask, 16) for name, mask in _MASKS.findall(Path(f"/proc/{pid}/status").read_text())}
    except OSError:
        return {}


def _has(mask: int, number: int) -> bool:
    return bool(mask >> (number - 1) & 1)


class StackSignal:
    """Let `faulthandler` write a stack to a memory file at a real-time signal that the program does not use.

    It writes the stack of the thread that gets the signal, which is the main thread unless that blocks the signal. To
    read the stacks of threads that run may crash the process. The signal stays registered until the process ends: to
    release it would undo a handler that the program has set since, and a signal on its way would end the process.

    Raises:
        OSError: The system has no memory files, or too many files are open.
    """

    _fd: ClassVar[int | None] = None
    _number: ClassVar[int] = 0

    def __init__(self) -> None:
        if StackSignal._fd is None:
            StackSignal._fd = os.memfd_create("stacks")
        self.fd: int = StackSignal._fd

    def usable(self) -> int:
        """Return the signal, registered again if the program has removed all handlers; 0: there is none."""
        masks = signal_masks("self")
        number = StackSignal._number
        if number and signal.getsignal(number) is signal.SIG_DFL and _has(masks.get("Cgt", 0), number):
            return number  # `getsignal` does not see the handler of `faulthandler`
        number = StackSignal._number = _unused_signal(masks)
        if number:
            faulthandler.unregister(number)  # else the module believes that it is registered still
            faulthandler.register(number, self.fd, all_threads=False, chain=False)
        return number

    @classmethod
    def disable_after_fork(cls) -> None:
        """Close the copy of the memory file in a forked child, which no companion sends the signal to."""
        if cls._fd is not None:
            if cls._number:
                faulthandler.unregister(cls._number)
            os.close(cls._fd)
            cls._fd, cls._number = None, 0


def _unused_signal(masks: Masks) -> int:
    used = masks.get("Cgt", 0) | masks.get("Ign", 0) | masks.get("Blk", 0)
    numbers = range(int(signal.SIGRTMAX), int(signal.SIGRTMIN) - 1, -1) if masks else ()
    return next((number for number in numbers if not _has(used, number)), 0)


class StackReader:
    """Ask for the stack of the training thread, and read it, in the companion process.

    Args:
        pid: The training process, which is the parent.
        fd: The descriptor of the file of `StackSignal`.
        page: The status page, which has the signal.
    """

    def __init__(self, pid: int, fd: int, page: PageReader) -> None:
        self._pid, self._fd, self._page = pid, fd, page

    def read(self) -> str:
        """Send the signal, and return the stack as text; empty if no stack is written.

        A system call of C code may be interrupted.
        """
        number = self._page.stack_signal
        # A signal that the process does not catch, for example after `exec`, would end it.
        if not number or os.getppid() != self._pid or not _has(signal_masks(self._pid).get("Cgt", 0), number):
            return ""
        earlier_bytes = os.fstat(self._fd).st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, number)
        self._wait_for_text(earlier_bytes)
        return os.pread(self._fd, MAX_STACK_BYTES, earlier_bytes).decode(errors="replace")

    def _wait_for_text(self, earlier_bytes: int) -> None:
        """Wait until the file has grown and grows no more."""
        size, deadline_s = earlier_bytes, time.monotonic() + _MAX_WAIT_S
        while time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
            before, size = size, os.fstat(self._fd).st_size
            if earlier_bytes < size == before:
                return
