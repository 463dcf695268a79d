"""Guard hooks against errors of torchotel, warn of a problem once, and find the cause of an exit."""

import functools
import logging
import math
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar

from torchotel._limits import MAX_FAULTS

_logger = logging.getLogger("torchotel")


P = ParamSpec("P")
R = TypeVar("R")


class Guard:
    """Count the internal errors of one part, log the first, and switch the part off after `limit` errors.

    A hot hook has its own `except Exception: guard.fault()`; other callbacks are wrapped with `guarded`.

    Args:
        part: Name of the part in the log.
        off: Switches the part off.
        limit: Faults after which the part is switched off.
        level: Level of the log records.
    """

    def __init__(
        self, part: str, off: Callable[[], None] | None = None, *, limit: int = MAX_FAULTS, level: int = logging.ERROR
    ) -> None:
        self.part = part
        self.off = off
        """Switches the part off; called once, on the thread of the fault that reached the limit."""
        self.faults = 0
        self.is_off = False
        """Whether the limit is reached."""
        self._limit, self._level = limit, level
        self._switched_off = False
        # Reentrant: logging a fault may run code that faults again on the same thread.
        self._lock = threading.RLock()

    def fault(self, *, iterated: bool = False) -> None:
        """Count the exception that is being handled; never raises.

        Args:
            iterated: PyTorch iterates over a dictionary of hooks, so no hook may be removed now. The part is switched
                off by the next guarded call without `iterated`.
        """
        with self._lock:
            self.faults += 1
            number = self.faults
            self.is_off = self.is_off or number >= self._limit
        if number == 1:
            # As text, not exc_info: a handler that keeps records would keep the frames' tensors alive.
            self._log("internal error in %s, your program goes on:\n%s", self.part, traceback.format_exc())
        if not iterated:
            self.apply_switch_off()

    def apply_switch_off(self) -> None:
        """Switch the part off if the limit is reached; not to be called while PyTorch iterates over hooks."""
        if self.is_off and not self._switched_off:
            self._switched_off = True
            self._log("%s switched off after %d internal errors", self.part, self._limit)
            self._switch_off()

    def guarded(self, function: Callable[P, R], *, iterated: bool = False) -> Callable[P, R | None]:
        """Wrap a callback that is not hot: if it raises, a fault is counted and None is returned.

        Args:
            function: The callback.
            iterated: Passed to `fault`.
        """

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
            if self.is_off and not iterated:
                self.apply_switch_off()
            try:
                return function(*args, **kwargs)
            except Exception:  # noqa: BLE001  # the purpose of the guard
                self.fault(iterated=iterated)
                return None

        return call

    def _switch_off(self) -> None:
        if self.off is None:
            return
        try:
            self.off()
        except Exception:  # noqa: BLE001  # must not raise into the program
            self._log("%s could not be switched off:\n%s", self.part, traceback.format_exc())

    def _log(self, message: str, *args: object) -> None:
        with suppress(Exception):  # a handler of the program may raise
            _logger.log(self._level, message, *args)


class Warn:
    """Log each problem once, from any thread; never raises.

    Args:
        quiet_s: Time after which the same problem is logged again.
    """

    def __init__(self, quiet_s: float = math.inf) -> None:
        self._quiet_s = quiet_s
        self._quiet_until_s: dict[object, float] = {}

    def __call__(self, text: str, *values: object, key: object = None, error: BaseException | None = None) -> bool:
        """Log a problem and return True, or return False if it was logged before.

        Args:
            text: The message, with placeholders for the values.
            values: Values of the message.
            key: Identifies the problem; None: the text does.
            error: Logged with its traceback, as an error instead of a warning.
        """
        key, now_s = text if key is None else key, time.monotonic()
        until_s = now_s + self._quiet_s
        known_s = self._quiet_until_s.setdefault(key, until_s)  # atomic: one of several threads logs
        if known_s is not until_s:
            if now_s < known_s:
                return False
            self._quiet_until_s[key] = until_s
        with suppress(Exception):  # a handler of the program may raise
            _logger.log(logging.WARNING if error is None else logging.ERROR, text, *values, exc_info=error)
        return True

    def forget(self) -> None:
        """Log every problem again."""
        self._quiet_until_s.clear()


process_warnings = Warn()
"""Warnings that are logged once in a process."""


def warn_once(text: str, *values: object) -> None:
    """Warn of a setting once for each set of values: each `instrument()` reads the variables again."""
    process_warnings(text, *values, key=(text, values))


def exit_cause(error: BaseException) -> BaseException:
    """Return the exception whose handler called `sys.exit`, as in a process of `torch.multiprocessing.spawn`.

    The handler must be in the function that called `sys.exit`: a program may train while it handles a failed import.
    """
    handled = error.__context__
    if not isinstance(error, SystemExit) or handled is None or error.__suppress_context__:
        return error
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    handlers = [frame for frame, _ in traceback.walk_tb(handled.__traceback__)]
    return handled if frames and frames[-1] in handlers else error
