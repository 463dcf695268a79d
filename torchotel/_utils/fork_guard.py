"""Libraries that threads of our own load, and forks, which must not come in the midst of that.

In a child that is forked while another thread imports a module, Python never lets go of that import's lock: whatever
imports the same there waits for ever. A DataLoader's workers are forked soon after the start.
"""

import os
import signal
import threading
from types import TracebackType

MAX_S = 10.0
"""What takes longer is waited for no more."""
AGAIN_S = 0.1

_under_way: set["Loading"] = set()
_interrupts: list[signal.Signals] = []
"""Those that came before the fork that is being made."""


class Loading:
    """A stretch in which a thread may import; forks by others wait for its end from when this is made."""

    def __init__(self) -> None:
        self._thread: int | None = None
        self._done = threading.Event()
        _under_way.add(self)

    def __enter__(self) -> None:
        self._thread = threading.get_ident()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _under_way.discard(self)
        self._done.set()

    def wait(self) -> None:
        """Wait for the end, once."""
        if self._thread != threading.get_ident():
            self._done.wait(MAX_S)
            _under_way.discard(self)


def _before_fork() -> None:
    try:
        for loading in tuple(_under_way):
            loading.wait()
    except KeyboardInterrupt:  # what is raised here is printed and forgotten: it must come again when this is over
        _interrupts.append(signal.SIGINT)


def _after_fork() -> None:
    if _interrupts:
        _interrupts.clear()
        threading.Timer(AGAIN_S, _interrupt_again).start()  # when others, whom fork calls after us, are done


def _in_child() -> None:
    _interrupts.clear()
    _under_way.clear()


def _interrupt_again() -> None:
    if callable(signal.getsignal(signal.SIGINT)):  # else it would end the program at once, or nobody would see it
        main = threading.main_thread().ident
        assert main is not None  # noqa: S101  # says so to the type checker
        signal.pthread_kill(main, signal.SIGINT)  # also wakes a thread that waits, as `interrupt_main` does not


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
