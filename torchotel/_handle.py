"""The handle that `instrument()` returns."""

from __future__ import annotations

import atexit
import logging
import multiprocessing.util
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from torch.compiler import is_compiling
from torch.nn import Module
from torch.utils.data import get_worker_info

from torchotel._lifecycle import LIFECYCLE, PAUSED, RUNNING, SHUT_DOWN
from torchotel._session import Session
from torchotel._types import ConfigError
from torchotel._utils.faults import Guard, exit_cause
from torchotel._utils.process import is_child
from torchotel.config.config import Config
from torchotel.worker.stats import HandleStats, no_stats

SHUTDOWN_S = 10.0

_logger = logging.getLogger("torchotel")


class Handle:
    """Control torchotel from `instrument()` to `shutdown()`; as a context manager it shuts down at the block's end.

    Without an explicit shutdown, torchotel shuts down at exit. The run has no normal end if an exception ends the
    program. A `sys.exit` with an exit code is no normal end either in a `with` block, under `torchotel run` and in a
    child of multiprocessing; at the end of a plain script it cannot be seen and counts as a normal end.
    """

    def __init__(
        self,
        explicit: Mapping[str, object],
        model: Module | None,
        *,
        zero_code: bool,
        defer_start: bool,
        environ: Mapping[str, str],
        session: Callable[..., Session],
    ) -> None:
        self.config = config = Config.read(explicit, environ)
        self._environ, self._make_session = environ, session
        self._explicit, self._zero_code, self._defers_start = explicit, zero_code, defer_start
        self._lock = threading.RLock()  # reentrant: a signal handler may call shutdown() during shutdown()
        self._stats = no_stats()
        self._folder: Path | None = None
        off = config.disabled or get_worker_info() is not None
        self._guard = Guard("torchotel", limit=1000)
        self._session = None if off else self._start_session(config, model, defer_start=defer_start)
        atexit.register(self._exit)
        if is_child():  # a child of multiprocessing ends without atexit
            multiprocessing.util.Finalize(self, self._exit, exitpriority=0)

    @property
    def prometheus_port(self) -> int | None:
        """The port that the scrape endpoint is bound to; None without a scrape endpoint."""
        session = self._session
        return None if session is None else session.prometheus_port

    @property
    def record_folder(self) -> Path | None:
        """The folder that the run is recorded in, also after `shutdown()`; None if it is not recorded."""
        session = self._session
        return self._folder if session is None else session.record_folder

    def flush(self, timeout_s: float = 10) -> bool:
        """Export every step that has ended on this thread, and the records of all other threads.

        Args:
            timeout_s: How many seconds to wait.

        Returns:
            False on timeout, or if spans were dropped since the last flush.
        """
        session = self._session
        return session is None or session.flush(timeout_s)

    def shutdown(self, timeout_s: float = SHUTDOWN_S) -> None:
        """Flush, remove every hook, stop the threads, close ports and files; a second call does nothing.

        Args:
            timeout_s: How many seconds the shutdown may take; 10.
        """
        self.end(timeout_s, finished=True)

    def end(self, timeout_s: float = SHUTDOWN_S, *, finished: bool, error: BaseException | None = None) -> None:
        """Shut down, and record how the run ended.

        Args:
            timeout_s: How many seconds the shutdown may take.
            finished: Whether the run came to a normal end.
            error: The exception that ended it.
        """
        LIFECYCLE.change_state(SHUT_DOWN, self)
        with self._lock:
            session, self._session = self._session, None
            if session is not None:
                try:
                    self._guard.guarded(session.stop)(timeout_s, finished=finished, error=error and exit_cause(error))
                finally:  # Ctrl-C may have ended the waiting
                    if self._zero_code:
                        self._guard.guarded(session.discard_empty)()
                    self._stats = self._guard.guarded(session.stats)() or no_stats()
                    self._folder = session.record_folder
        atexit.unregister(self._exit)

    def stats(self) -> HandleStats:
        """Return counts of what the worker has processed, spans, steps, evaluations and errors, and its state.

        After `shutdown()`, and after a `flush()` that returned True, `spans_recorded` is
        `spans_exported + spans_dropped + spans_sampled_out`.
        """
        session = self._session
        counts = self._stats if session is None else self._guard.guarded(session.stats)() or no_stats()
        worker = None if session is None else self._guard.guarded(session.worker_state)()
        return HandleStats(**counts, worker=worker)

    def detail(self, *, steps: int) -> None:
        """Record the next steps in detail, whatever the setting; may be called from any thread.

        Args:
            steps: How many steps, at least 1; any other value does nothing and logs a warning.
        """
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            _logger.warning("detail(steps=%r) does nothing. Pass a whole number of at least 1", steps)
            return
        session = self._session
        if session is not None:
            session.ask_detail(steps)

    def pause(self) -> None:
        """Remove every hook, and hand recorded steps to the worker; the exporters continue."""
        with self._lock:
            if self._session is not None:
                self._session.pause()
                LIFECYCLE.change_state(PAUSED, self)

    def resume(self) -> None:
        """Install the hooks again after `pause()`; without a pause, do nothing."""
        with self._lock:
            if self._session is not None:
                self._session.resume()
                LIFECYCLE.change_state(RUNNING, self)

    def reconfigure(self, explicit: Mapping[str, object], model: Module | None) -> None:
        """Apply another call of `instrument()`.

        Before the first step, its arguments replace the settings of zero code, and a deferred start is deferred no
        longer. After that, arguments that differ are ignored with a warning.
        """
        session = self._session
        if session is None:
            return
        merged = {**self._explicit, **explicit}
        wanted = Config.read(merged, self._environ)
        if (wanted != self.config or self._defers_start) and self._zero_code and not session.began:
            self._replace_session(session, wanted, model)
            self.config, self._explicit, self._zero_code, self._defers_start = wanted, merged, False, False
            return
        if wanted != self.config:
            changed = [name for name in explicit if getattr(wanted, name) != getattr(self.config, name)]
            _logger.warning(
                "instrument() was called again with another %s; the settings of the first call stay. "
                "Call uninstrument() before, to change them.",
                " and ".join(changed),
            )
        if model is not None:
            session.register_model(model)

    def _replace_session(self, session: Session, config: Config, model: Module | None) -> None:
        session.discard()
        self._session = None
        try:
            self._session = self._start_session(config, model, defer_start=False)
            LIFECYCLE.change_state(RUNNING, self)
        except ConfigError:
            self.shutdown()  # a later instrument() makes a new handle
            raise

    def _start_session(self, config: Config, model: Module | None, *, defer_start: bool) -> Session | None:
        try:
            return self._make_session(config, model, defer_start=defer_start)
        except ConfigError:
            raise
        except Exception:  # noqa: BLE001  # the program continues without instrumentation
            self._guard.fault()
            return None

    @property
    def session(self) -> Session | None:
        """The session; None after `shutdown()`, and if torchotel is disabled."""
        return self._session

    def _exit(self) -> None:
        # Python has printed the exception that ended the program, or a child of multiprocessing is being ended by
        # one. The exit code of `sys.exit` in a main process is not available to atexit callbacks.
        printed: BaseException | None = getattr(sys, "last_value", None)
        session = self._session
        if printed is not None and session is not None and not session.has_ended_with(printed):
            printed = None
        error = next((one for one in (printed, sys.exc_info()[1]) if not _is_normal(one)), None)
        with suppress(KeyboardInterrupt):  # it has ended the waiting, and the program has ended already
            self.end(finished=error is None, error=error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end(finished=_is_normal(error), error=None if _is_normal(error) else error)

    def disable_after_fork(self) -> None:
        """Remove the hooks in a forked child, which has no worker thread and may be a DataLoader's worker."""
        self._lock = threading.RLock()  # another thread of the parent may have held the lock
        session, self._session = self._session, None
        if session is not None:
            session.disable_after_fork()


def _is_normal(error: BaseException | None) -> bool:
    return error is None or (isinstance(error, SystemExit) and (error.code is None or error.code == 0))


def start(
    explicit: Mapping[str, object],
    model: Module | None,
    *,
    zero_code: bool = False,
    defer_start: bool = False,
    environ: Mapping[str, str] = os.environ,
    session: Callable[..., Session] = Session,
) -> Handle:
    """Return the handle of this process, with a new session if nothing runs.

    Args:
        explicit: The settings that were passed as arguments or options; all others are read from `environ`.
        model: Its modules get their full names from the first call on.
        zero_code: Whether the program itself did not call `instrument()`; if it calls it later, its settings win.
        defer_start: Whether ports are opened, and metrics are pushed, only from the first record on.
        environ: The environment variables.
        session: Makes the session.
    """
    if model is not None and not isinstance(model, Module):
        raise ConfigError("model", model, "a torch.nn.Module, or None")
    LIFECYCLE.is_compiling = is_compiling
    return LIFECYCLE.run(
        lambda: Handle(explicit, model, zero_code=zero_code, defer_start=defer_start, environ=environ, session=session),
        lambda handle: handle.reconfigure(explicit, model),
    )
