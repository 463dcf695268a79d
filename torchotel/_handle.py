"""What `instrument()` returns, and the one that is current in this process."""

from __future__ import annotations

import atexit
import logging
import multiprocessing.util
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from torch.compiler import is_compiling as is_compiling  # noqa: PLC0414  # for `_annotate`, which must not load torch
from torch.nn import Module
from torch.utils.data import get_worker_info

from torchotel._session import Session, Stats, no_stats
from torchotel._types import ConfigError
from torchotel._utils.faults import Guard
from torchotel.config.config import Config

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
        given: Mapping[str, object],
        model: Module | None,
        *,
        zero_code: bool,
        wait: bool,
        environ: Mapping[str, str],
        session: Callable[..., Session],
    ) -> None:
        self.config = config = Config.read(given, environ)
        self._environ, self._make_session = environ, session
        self._given, self._zero_code, self._waits = given, zero_code, wait
        self._lock = threading.RLock()  # a signal's handler may shut down what is being shut down
        self._stats = no_stats()
        self._folder: Path | None = None
        off = config.disabled or get_worker_info() is not None
        self._guard = Guard("torchotel", limit=1000)
        self._session = None if off else self._begin(config, model, wait=wait)
        atexit.register(self._exit)
        if multiprocessing.parent_process() is not None:  # such a child ends without atexit
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
        """Export all that ended on this thread and all that other threads handed over.

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
        """Shut down, and say whether the run came to a normal end or which exception ended it."""
        _forget(self)
        with self._lock:
            session, self._session = self._session, None
            if session is not None:
                self._guard.guarded(session.stop)(timeout_s, finished=finished, error=error)
                if self._zero_code:
                    self._guard.guarded(session.discard_empty)()
                self._stats = self._guard.guarded(session.stats)() or no_stats()
                self._folder = session.record_folder
        atexit.unregister(self._exit)

    def stats(self) -> Stats:
        """Return counts of spans, steps, evaluations and errors, as far as the worker has processed them.

        After `shutdown()`, and after a `flush()` that returned True, `spans_recorded` is
        `spans_exported + spans_dropped + spans_sampled_out`.
        """
        session = self._session
        return self._stats.copy() if session is None else self._guard.guarded(session.stats)() or no_stats()

    def detail(self, *, steps: int) -> None:
        """Record the next steps in detail, whatever the setting; may be called from any thread.

        Args:
            steps: How many steps, at least 1; any other value does nothing and logs a warning.
        """
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            _logger.warning("detail(steps=%r) does nothing: it takes a whole number of at least 1", steps)
            return
        session = self._session
        if session is not None:
            session.ask_detail(steps)

    def pause(self) -> None:
        """Remove every hook, and hand recorded steps to the worker; the exporters continue."""
        with self._lock:
            if self._session is not None:
                self._session.pause()

    def resume(self) -> None:
        """Install the hooks again after `pause()`; else do nothing."""
        with self._lock:
            if self._session is not None:
                self._session.resume()

    def again(self, given: Mapping[str, object], model: Module | None) -> None:
        """Take another call of `instrument()`: its settings win over zero-code's while nothing was seen yet.

        What waited for something to tell waits no more.
        """
        session = self._session
        if session is None:
            return
        wanted = Config.read({**self._given, **given}, self._environ)
        if (wanted != self.config or self._waits) and self._zero_code and not session.began:
            session.discard()
            self._session = None
            try:
                self._session = self._begin(wanted, model, wait=False)
            except ConfigError:
                self.shutdown()  # so that a later call starts anew
                raise
            self.config, self._given, self._zero_code, self._waits = wanted, {**self._given, **given}, False, False
            return
        if wanted != self.config:
            changed = [name for name in given if getattr(wanted, name) != getattr(self.config, name)]
            _logger.warning(
                "instrument() was called again with another %s; the settings of the first call stay. "
                "Call uninstrument() before, to change them.",
                " and ".join(changed),
            )
        if model is not None:
            session.learn(model)

    def _begin(self, config: Config, model: Module | None, *, wait: bool) -> Session | None:
        try:
            return self._make_session(config, model, wait=wait)
        except ConfigError:
            raise
        except Exception:  # noqa: BLE001  # the program goes on without us
            self._guard.fault()
            return None

    @property
    def session(self) -> Session | None:
        """What runs, if anything does."""
        return self._session

    def _exit(self) -> None:
        # Python has printed what ended the program, or a child of multiprocessing is just ending by it. The code of
        # a `sys.exit` in a main process can't be had: python has let go of it by now.
        printed: BaseException | None = getattr(sys, "last_value", None)
        error = next((one for one in (printed, sys.exc_info()[1]) if not _is_normal(one)), None)
        self.end(finished=error is None, error=error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end(finished=_is_normal(error), error=None if _is_normal(error) else error)

    def detach(self) -> None:
        """Be off in a forked child: it has no worker, and a DataLoader's workers are not to be seen."""
        self._lock = threading.RLock()  # a thread of the parent may have held it
        session, self._session = self._session, None
        if session is not None:
            session.detach()


def _is_normal(error: BaseException | None) -> bool:
    return error is None or (isinstance(error, SystemExit) and (error.code is None or error.code == 0))


_current: Handle | None = None
_current_lock = threading.RLock()


def start(
    given: Mapping[str, object],
    model: Module | None,
    *,
    zero_code: bool = False,
    wait: bool = False,
    environ: Mapping[str, str] = os.environ,
    session: Callable[..., Session] = Session,
) -> Handle:
    """Start what was given, the rest read from variables, or hand it to what runs already.

    Args:
        given: Settings that were said.
        model: Its modules get their full names from the first call on.
        zero_code: Whether the program did not ask for it, so that what it asks for itself wins.
        wait: Whether ports are opened and metrics pushed only when there is something to tell.
        environ: The variables.
        session: Makes what runs.
    """
    global _current  # noqa: PLW0603  # hooks are global to the process, so is what put them in
    if model is not None and not isinstance(model, Module):
        raise ConfigError("model", model, "a torch.nn.Module, or None")
    with _current_lock:
        if _current is None:
            _current = Handle(given, model, zero_code=zero_code, wait=wait, environ=environ, session=session)
        else:
            _current.again(given, model)
        return _current


def running() -> Session | None:
    """Return what runs in this process, if anything does."""
    return None if _current is None else _current.session


def stop() -> None:
    """Shut down what runs, if anything does."""
    if _current is not None:
        _current.shutdown()


def _forked() -> None:
    global _current, _current_lock  # noqa: PLW0603  # another thread may have held the lock when this child was forked
    _current_lock = threading.RLock()
    handle, _current = _current, None
    if handle is not None:
        handle.detach()


os.register_at_fork(after_in_child=_forked)


def _forget(handle: Handle) -> None:
    global _current  # noqa: PLW0603  # see start
    if _current is handle:
        _current = None
