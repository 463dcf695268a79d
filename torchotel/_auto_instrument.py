"""Start when the program imports torch, and not before: a process that never does pays nothing."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from torchotel._api import start_handle
from torchotel._types import ConfigError
from torchotel._utils.imports import after_import
from torchotel._utils.process import is_being_spawned, when_given_a_task

if TYPE_CHECKING:
    from torchotel._handle import Handle


_logger = logging.getLogger("torchotel")


class _Start(NamedTuple):
    """A start that waits for torch."""

    given: Mapping[str, object]
    wait: bool
    started: Callable[[Handle], None]
    failed: Callable[[ConfigError], None]


_waiting: _Start | None = None
_stop_watching: Callable[[], None] = lambda: None  # noqa: E731  # replaced by what calls a watch off


def start_with_torch(
    given: Mapping[str, object],
    *,
    wait: bool,
    failed: Callable[[ConfigError], None],
    started: Callable[[Handle], None] = lambda _: None,
) -> None:
    """Start when torch has been imported, at once where it has.

    Args:
        given: Settings that were said.
        wait: Whether ports are opened and metrics pushed only when there is something to tell.
        failed: Gets the error of a setting that can't be used; nothing was installed then.
        started: Gets the handle.
    """
    global _waiting, _stop_watching  # noqa: PLW0603  # what is imported is the process's, and so is who waits for it
    _stay_off_when_forked()
    call_off()
    _waiting = _Start(given, wait, started, failed)
    _stop_watching = after_import("torch", lambda _: _torch_came())


def _torch_came() -> None:
    handle_module = sys.modules.get("torchotel._handle")
    if handle_module is not None and not hasattr(handle_module, "start"):
        return  # the program's own instrument() is importing torch, and starts this when it has
    if is_being_spawned():
        when_given_a_task(start_now)  # which may be a DataLoader's
    else:
        start_now()


def start_now() -> None:
    """Start what waits for torch, which is there; an error of ours is logged and never raised into the import."""
    global _waiting
    waiting, _waiting = _waiting, None
    if waiting is None:
        return
    try:
        handle = start_handle(waiting.given, None, zero_code=True, wait=waiting.wait)
    except ConfigError as error:
        waiting.failed(error)
    except Exception:
        _logger.exception("torchotel could not start; the program runs without it")
    else:
        waiting.started(handle)


def call_off() -> None:
    """Wait for torch no more."""
    global _waiting  # noqa: PLW0603  # see start_with_torch
    _waiting = None
    _stop_watching()


@functools.cache
def _stay_off_when_forked() -> None:
    os.register_at_fork(after_in_child=call_off)
