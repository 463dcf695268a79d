"""The lifecycle of torchotel in this process: its states, and the transitions between them.

    not started        -- zero code, before torch is imported -->  waiting for torch
    waiting for torch  -- import torch -------------------------->  running
    waiting for torch  -- uninstrument() ------------------------>  not started
    running            -- Handle.pause() ------------------------>  paused
    paused             -- Handle.resume() ----------------------->  running
    running, paused    -- shutdown(), uninstrument(), exit ------>  shut down
    any but the first  -- os.fork(), in the child --------------->  disabled after fork
    any                -- instrument() -------------------------->  running, or paused if it was

This module does not import torch.
"""

from __future__ import annotations

import os
from _thread import RLock  # the class of threading.RLock(); importing threading takes 1.5 ms

TYPE_CHECKING = False  # importing typing takes half of the time that `import torchotel` may take
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Final

    from torchotel._handle import Handle
    from torchotel._session import Session

NOT_STARTED: Final = "not started"
WAITING_FOR_TORCH: Final = "waiting for torch"
"""Zero code has registered a start, which runs when the program imports torch."""
RUNNING: Final = "running"
"""There is a handle. It has no session if OTEL_SDK_DISABLED is set, and in a worker of a DataLoader."""
PAUSED: Final = "paused"
"""There is a handle whose hooks are removed until `resume()`."""
SHUT_DOWN: Final = "shut down"
DISABLED_AFTER_FORK: Final = "disabled after fork"
"""This is a forked child. The worker thread is the parent's, so nothing is recorded until `instrument()`."""


class Lifecycle:
    """The state of torchotel in this process; hooks are global to a process, so there is one `LIFECYCLE`."""

    def __init__(self) -> None:
        self.state: str = NOT_STARTED
        self.handle: Handle | None = None
        """The handle that `instrument()` returns; None unless the state is running or paused."""
        self.is_compiling: Callable[[], bool] = lambda: False
        """`torch.compiler.is_compiling`, once torch is imported."""
        self._deferred_start: Callable[[], None] | None = None
        self._lock = RLock()  # reentrant: a signal handler may call instrument() during instrument()
        self._handles_forks = False

    @property
    def session(self) -> Session | None:
        """The session that runs in this process; None without one."""
        handle = self.handle
        return None if handle is None else handle.session

    def wait_for_torch(self, start: Callable[[], None]) -> None:
        """Keep a start for the import of torch, unless a handle exists; it replaces an earlier deferred start."""
        with self._lock:
            self._handle_forks()
            if self.handle is None:
                self.state, self._deferred_start = WAITING_FOR_TORCH, start

    def start_deferred(self) -> None:
        """Run the deferred start, if there is one."""
        start = self._cancel_deferred_start()
        if start is not None:
            start()

    def run(self, make: Callable[[], Handle], reconfigure: Callable[[Handle], None]) -> Handle:
        """Return the handle of this process.

        Args:
            make: Makes the handle if there is none.
            reconfigure: Called with the handle if there is one.
        """
        with self._lock:
            self._handle_forks()
            if self.handle is None:
                self.handle = make()
                self.state = RUNNING
            else:
                reconfigure(self.handle)
            return self.handle

    def change_state(self, state: str, handle: Handle) -> None:
        """Change the state to running, paused or shut down; the handle of an earlier run changes nothing."""
        if self.handle is handle:
            self.state = state
            if state == SHUT_DOWN:
                self.handle = None

    def stop(self) -> None:
        """Cancel the deferred start, and shut down the handle if there is one."""
        self._cancel_deferred_start()
        handle = self.handle
        if handle is not None:
            handle.shutdown()

    def disable_after_fork(self) -> None:
        """Remove the hooks in a forked child."""
        self._lock = RLock()  # another thread of the parent may have held the lock
        self._deferred_start = None
        handle, self.handle = self.handle, None
        if self.state != NOT_STARTED:
            self.state = DISABLED_AFTER_FORK
        if handle is not None:
            handle.disable_after_fork()

    def _handle_forks(self) -> None:
        """Register the handler of forks, after those of `threading` and `logging`, which repair the locks it needs."""
        if not self._handles_forks:
            self._handles_forks = True
            os.register_at_fork(after_in_child=self.disable_after_fork)

    def _cancel_deferred_start(self) -> Callable[[], None] | None:
        start, self._deferred_start = self._deferred_start, None
        if self.state == WAITING_FOR_TORCH:
            self.state = NOT_STARTED
        return start


LIFECYCLE = Lifecycle()
