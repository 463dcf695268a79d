"""Keep forks apart from calls of the program's span processors, whose locks a forked child would inherit."""

from __future__ import annotations

import os
import threading
from weakref import WeakSet

FORK_WAIT_S = 1.0
"""Longest time that a fork waits for a processor."""


class ForkGate:
    """Let a thread call the program's processors only while no other thread forks.

    Without torchotel, a program may call its processors only on the thread that forks. The gate is a context manager.
    """

    def __init__(self) -> None:
        self.reset()
        _gates.add(self)

    def __enter__(self) -> None:
        with self._changed:
            while self._forking:
                self._changed.wait(FORK_WAIT_S)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def begin_fork(self) -> None:
        """Hold new calls up, and wait until the present ones return."""
        with self._changed:
            self._forking += 1
            self._changed.wait_for(lambda: not self._inside, FORK_WAIT_S)

    def end_fork(self) -> None:
        """Let the calls of the parent process go on."""
        with self._changed:
            self._forking -= 1
            self._changed.notify_all()

    def reset(self) -> None:
        """Set the counts to 0 in a forked child, which has no other thread."""
        self._changed = threading.Condition()
        self._inside = self._forking = 0


_gates: WeakSet[ForkGate] = WeakSet()


def _begin_fork() -> None:
    for gate in tuple(_gates):
        gate.begin_fork()


def _end_fork() -> None:
    for gate in tuple(_gates):
        gate.end_fork()


def _reset() -> None:
    for gate in tuple(_gates):
        gate.reset()


os.register_at_fork(before=_begin_fork, after_in_parent=_end_fork, after_in_child=_reset)
