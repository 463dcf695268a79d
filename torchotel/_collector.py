"""The garbage collector, kept from looking through what is only being made."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Hold collections back: what is made meanwhile stays, and each would look through it all the same.

    It is off for all threads, so for no longer than loading and starting takes; one that was off stays off.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
