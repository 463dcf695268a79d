"""The stacks of the training process, which `faulthandler` writes at a signal, also while C code holds the GIL."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

MAX_STACK_BYTES: Final = 1 << 16
_THREAD: Final = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)[^\n]*\n((?:  [^\n]*\n)*)", re.MULTILINE)
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


class StackSignal:
    """Let `faulthandler` write all stacks to a memory file at a real-time signal that nothing uses.

    Raises:
        OSError: The system has no memory files, or too many files are open.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("torchotel-stacks")
        self.number = _unused_signal()
        """The signal; None if all are in use."""
        if self.number is not None:
            faulthandler.register(self.number, self.fd, all_threads=True, chain=False)

    def close(self) -> None:
        """Release the signal; the companion must have ended, because the signal would end this process."""
        if self.number is not None:
            faulthandler.unregister(self.number)
        if self.fd >= 0:
            os.close(self.fd)
        self.fd, self.number = -1, None


def _unused_signal() -> int | None:
    masks = signal_masks("self")
    used = masks.get("Cgt", 0) | masks.get("Ign", 0) | masks.get("Blk", 0)
    numbers = range(int(signal.SIGRTMAX), int(signal.SIGRTMIN) - 1, -1) if masks else ()
    return next((number for number in numbers if not used >> (number - 1) & 1), None)


class StackReader:
    """Ask for the stacks of the training process, and read them, in the companion process.

    Args:
        pid: The training process, which is the parent.
        fd: The descriptor of the file of `StackSignal`.
        number: The signal; None: there is none.
    """

    def __init__(self, pid: int, fd: int, number: int | None) -> None:
        self._pid, self._fd, self._number = pid, fd, number

    def read(self, thread: int) -> tuple[str, list[Frame]]:
        """Send the signal; return all stacks as text, and the frames of one thread, the innermost first.

        A system call of the program may be interrupted. Both are empty if `faulthandler` does not wait for the signal.

        Args:
            thread: The id of the thread; without frames if the stacks do not have it.
        """
        number = self._number
        # A signal that the process does not catch, for example after `exec`, would end it.
        if number is None or os.getppid() != self._pid or not signal_masks(self._pid).get("Cgt", 0) >> (number - 1) & 1:
            return "", []
        earlier_bytes = os.fstat(self._fd).st_size
        os.kill(self._pid, number)
        self._wait_for_text(earlier_bytes)
        text = os.pread(self._fd, MAX_STACK_BYTES, earlier_bytes).decode(errors="replace")
        for ident, frames in _THREAD.findall(text):
            if int(ident, 16) == thread:
                return text, frames_of(frames)
        return text, []

    def _wait_for_text(self, earlier_bytes: int) -> None:
        """Wait until the file has grown and grows no more."""
        size, deadline_s = earlier_bytes, time.monotonic() + _MAX_WAIT_S
        while time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
            before, size = size, os.fstat(self._fd).st_size
            if earlier_bytes < size == before:
                return
