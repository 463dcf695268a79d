"""Zero code: start when the program imports torch; a program that never imports it pays nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from torchotel._api import start_handle
from torchotel._lifecycle import LIFECYCLE
from torchotel._types import ConfigError
from torchotel._utils.imports import after_import
from torchotel._utils.process import is_being_spawned, when_given_a_task

if TYPE_CHECKING:
    from torchotel._handle import Handle


_logger = logging.getLogger("torchotel")


def start_with_torch(
    explicit: Mapping[str, object],
    *,
    defer_start: bool,
    failed: Callable[[ConfigError], None],
    started: Callable[[Handle], None] = lambda _: None,
) -> None:
    """Start when torch is imported, or now if it is imported already.

    Args:
        explicit: The settings that were passed as arguments or options.
        defer_start: Whether ports are opened, and metrics are pushed, only from the first record on.
        failed: Called with the error of a bad setting; nothing is installed then.
        started: Called with the handle.
    """
    start = partial(_start, explicit, defer_start=defer_start, failed=failed, started=started)
    if LIFECYCLE.handle is not None:
        start()
        return
    LIFECYCLE.wait_for_torch(start)
    after_import("torch", lambda _: _torch_imported())


def _torch_imported() -> None:
    if is_being_spawned():
        when_given_a_task(LIFECYCLE.start_deferred)  # never called in a worker of a DataLoader
    else:
        LIFECYCLE.start_deferred()


def _start(
    explicit: Mapping[str, object],
    *,
    defer_start: bool,
    failed: Callable[[ConfigError], None],
    started: Callable[[Handle], None],
) -> None:
    """Start, and log an internal error: raising it would fail the program's import of torch."""
    try:
        handle = start_handle(explicit, None, zero_code=True, defer_start=defer_start)
    except ConfigError as error:
        failed(error)
    except Exception:
        _logger.exception("torchotel could not start; the program runs without it")
    else:
        started(handle)
