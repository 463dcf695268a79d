"""Detect stalls of the training process in the companion process: a phase is open, and nothing happens.

`faulthandler` writes the stack of the training thread at a signal, also while C code holds the GIL.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time
from pathlib import Path
from typing import ClassVar, Final, NamedTuple, TypeAlias

from torchotel._utils.stacks import is_program
from torchotel.worker.collective_watch import StallLimit
from torchotel.worker.status_page import PagePhase, PageReader

MAX_TICK_S: Final = 5.0
"""Longest time between two checks that counts: the companion or the machine may have been stopped."""
_PHASE_CODE: Final = re.compile(
    r"/(torch/nn/modules/module|torch/optim/optimizer|torchotel/capture/torch_internals)\.py$"
)
"""During each phase, one of these files is on the stack."""
_COMPILER: Final = re.compile(r"/torch/(_dynamo/convert_frame|_inductor/compile_fx)\.py$")
_DEBUGGER: Final = re.compile(r"/(bdb|code|pydevd[^/]*|IPython/terminal/embed)\.py$")
_STOPPED: Final = re.compile(r"^(State:\s*[Tt]|TracerPid:\s*[1-9])", re.MULTILINE)
_WAITS_FOR_DEVICE: Final = re.compile(r"^State:\s*D", re.MULTILINE)
"""A state in which a process gets no signal: a network file system or a driver does not answer."""
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
    """Return the innermost frames in one line, and the innermost frame of the program."""
    shown = frames[:_MAX_SHOWN_FRAMES]
    own = [frame for frame in frames if is_program(frame.path)][:1]
    text = ", called from ".join(map(str, shown))
    return text if not own or own[0] in shown else f"{text}, in the program {own[0]}"


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


class Stall(NamedTuple):
    """Where the training process has stalled."""

    phases: list[PagePhase]
    """The phases of the page before the stack was read: the signal may end what the process waits for."""
    module: str
    """The path of the innermost module call at that time; "" if it is unknown, or none ran."""
    seen_ns: int
    """When both were read, in time of `perf_counter_ns`."""
    quiet_s: float
    """Seconds without an event."""
    stack: str
    """The stack of the training thread; empty: it waits for a device, and writes none."""
    frames: list[Frame]
    """Its frames, the innermost first."""


class StallWatch:
    """Find stalls; the caller calls `check` about once a second.

    Args:
        page: The status page.
        stacks: Reads the stack of the training thread.
        pid: The training process.
        timeout_s: Shortest time without an event that counts as a stall.
    """

    def __init__(self, page: PageReader, stacks: StackReader, pid: int, timeout_s: float) -> None:
        self._page, self._stacks, self._pid = page, stacks, pid
        self.limit = StallLimit(timeout_s)
        """The time without an event that counts as a stall."""
        self._content = b""
        self._checked_s = time.monotonic()
        self._asked_at_s = 0.0
        self.quiet_s = 0.0
        """Seconds without an event, in which the training was not stopped."""
        self.is_stalled = False
        """Whether the training stalls now."""

    def check(self, now_s: float) -> Stall | None:
        """Return a stall when it is found, once; None if there is none, and while it lasts."""
        elapsed_s, self._checked_s = min(now_s - self._checked_s, MAX_TICK_S), now_s
        if (content := self._page.content()) != self._content:
            self._content, self.quiet_s, self._asked_at_s, self.is_stalled = content, 0.0, 0.0, False
            return None
        seen_ns, status = time.perf_counter_ns(), _status(self._pid)
        if _STOPPED.search(status):
            return None
        self.quiet_s += elapsed_s
        phases, module = self._page.phases(seen_ns), self._page.module
        if all(phase.end_ns for phase in phases) or self.quiet_s < max(self.limit.seconds, 2 * self._asked_at_s):
            return None
        self._asked_at_s = self.quiet_s  # each signal may interrupt a system call, so the next one is not soon
        text = "" if _WAITS_FOR_DEVICE.search(status) else self._stacks.read()
        frames, was_stalled = frames_of(text), self.is_stalled
        # It is read again while the stall lasts: an exception may end the wait, and not the phase on the page.
        self.is_stalled = _shows_stall(frames) or _WAITS_FOR_DEVICE.search(status) is not None
        return Stall(phases, module, seen_ns, self.quiet_s, text, frames) if self.is_stalled > was_stalled else None


def _shows_stall(frames: list[Frame]) -> bool:
    """Return whether a phase runs, and waits neither for the compiler nor for a debugger.

    An exception may have ended an open phase, for example in a notebook. Then no frame of a phase is on the stack.
    """
    paths = [frame.path for frame in frames]
    waits = any(_COMPILER.search(path) or _DEBUGGER.search(path) for path in paths)
    return not waits and any(map(_PHASE_CODE.search, paths))


def _status(pid: int) -> str:
    """Return the status of a process as the system reports it; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return ""
