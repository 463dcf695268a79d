"""Detect stalls of the training process in the companion process: a phase is open, and nothing happens."""

from __future__ import annotations

import re
import time
from collections import deque
from pathlib import Path
from typing import Final, NamedTuple

from torchotel.worker.stack_dump import Frame, StackReader, frames_of
from torchotel.worker.status_page import PagePhase, PageReader

MAX_TICK_S: Final = 5.0
"""Longest time between two checks that counts: the companion or the machine may have been stopped."""
STALL_FACTOR: Final = 10
"""A stall lasts at least this number of times the 95th percentile of the last steps."""
MAX_STEPS: Final = 256
"""Steps whose durations are kept."""
FIRST_STEP_FACTOR: Final = 5
"""Before the end of the first step the limit is longer by this factor: devices start, and caches are empty."""
_PHASE_CODE: Final = re.compile(
    r"/(torch/nn/modules/module|torch/optim/optimizer|torchotel/capture/torch_internals)\.py$"
)
"""During each phase, one of these files is on the stack."""
_COMPILER: Final = re.compile(r"/torch/(_dynamo/convert_frame|_inductor/compile_fx)\.py$")
_DEBUGGER: Final = re.compile(r"/(bdb|code|pydevd[^/]*|IPython/terminal/embed)\.py$")
_STOPPED: Final = re.compile(r"^(State:\s*[Tt]|TracerPid:\s*[1-9])", re.MULTILINE)
_WAITS_FOR_DEVICE: Final = re.compile(r"^State:\s*D", re.MULTILINE)
"""A state in which a process gets no signal: a network file system or a driver does not answer."""


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
        self._page, self._stacks, self._pid, self._timeout_s = page, stacks, pid, timeout_s
        self._durations_s: deque[float] = deque(maxlen=MAX_STEPS)
        self._content = b""
        self._checked_s = time.monotonic()
        self._quiet_s = self._asked_at_s = 0.0
        self.is_stalled = False
        """Whether the training stalls now."""

    def add_step(self, duration_s: float) -> None:
        """Note the duration of a step, which the limit depends on."""
        self._durations_s.append(duration_s)

    def check(self, now_s: float) -> Stall | None:
        """Return a stall when it is found, once; None if there is none, and while it lasts."""
        elapsed_s, self._checked_s = min(now_s - self._checked_s, MAX_TICK_S), now_s
        if (content := self._page.content()) != self._content:
            self._content, self._quiet_s, self._asked_at_s, self.is_stalled = content, 0.0, 0.0, False
            return None
        seen_ns, status = time.perf_counter_ns(), _status(self._pid)
        phases, module = self._page.phases(seen_ns), self._page.module
        if all(phase.end_ns for phase in phases) or _STOPPED.search(status):
            return None
        self._quiet_s += elapsed_s
        if self._quiet_s < max(self._limit_s(), 2 * self._asked_at_s):
            return None
        self._asked_at_s = self._quiet_s  # each signal may interrupt a system call, so the next one is not soon
        text = "" if _WAITS_FOR_DEVICE.search(status) else self._stacks.read()
        frames, was_stalled = frames_of(text), self.is_stalled
        # It is read again while the stall lasts: an exception may end the wait, and not the phase on the page.
        self.is_stalled = _shows_stall(frames) or _WAITS_FOR_DEVICE.search(status) is not None
        return Stall(phases, module, seen_ns, self._quiet_s, text, frames) if self.is_stalled > was_stalled else None

    def _limit_s(self) -> float:
        ordered = sorted(self._durations_s)
        if not ordered:
            return FIRST_STEP_FACTOR * self._timeout_s
        return max(self._timeout_s, STALL_FACTOR * ordered[int(0.95 * (len(ordered) - 1))])


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
