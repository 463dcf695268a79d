"""Stamps the ends of collectives, on a thread of torchotel's own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

WAIT = timedelta(seconds=0.05)
"""Longest wait before the thread looks whether it shall end."""
JOIN_S = 1.0
MAX_WAITING = 1024
"""Collectives that wait for their turn; the ends of more are not stamped."""


class CollectiveEnds:
    """Wait for collectives one after the other, and stamp their ends.

    A callback of the future would run on a thread of gloo. While the program holds the GIL, that thread could run no
    other collective, and other ranks would wait for it; and at the end of the process it would call into an interpreter
    that is gone. A work is kept until it is done, as its backend keeps it.
    """

    def __init__(self) -> None:
        self._works: SimpleQueue[tuple[Any, Callable[[], None]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._has_ended = False

    def add(self, work: Any, done: Callable[[], None]) -> None:
        """Call a function when a collective is done; may start the thread.

        Args:
            work: The work of the collective. A send or a receive may be waited for only once, by the program.
            done: Called on the thread.
        """
        if self._thread is None and not self._has_ended:
            self._thread = threading.Thread(target=self._run, name="torchotel-collectives", daemon=True)
            self._thread.start()
        if self._works.qsize() < MAX_WAITING:
            self._works.put((work, done))

    def stop(self) -> None:
        """End the thread."""
        self._has_ended = True
        thread, self._thread = self._thread, None
        if thread is not None:
            self._works.put(None)
            thread.join(JOIN_S)

    def _run(self) -> None:
        while (entry := self._works.get()) is not None and not self._has_ended:
            work, done = entry
            while not self._has_ended:
                try:
                    work.wait(WAIT)
                except RuntimeError:  # it takes longer, or has failed, which the program's own wait raises
                    if not work.is_completed():
                        continue
                done()
                break
            del entry, work, done  # it has tensors
