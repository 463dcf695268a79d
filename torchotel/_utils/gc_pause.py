"""The garbage collector, kept from looking through what is only being made."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

_held_back: list[None] = []
"""One for each that holds collections back."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Hold collections back: what is made meanwhile stays, and each would look through it all the same.

    It is off for all threads, so for no longer than loading and starting takes; one that was off stays off, unless
    another thread has switched it off just then.
    """
    if not gc.isenabled():
        yield
        return
    _held_back.append(None)
    try:
        gc.disable()
        yield
    finally:
        _held_back.pop()
        gc.enable()


def _in_child() -> None:
    """Go on collecting in a process that another thread has forked meanwhile: nobody comes back to it there."""
    if _held_back:
        _held_back.clear()
        gc.enable()


os.register_at_fork(after_in_child=_in_child)
