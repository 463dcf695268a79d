"""Yield the GIL to the training thread at regular intervals of the worker's Python code."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import TypeVar

Item = TypeVar("Item")

SLICE_ITEMS = 256
"""Items between two yields. An item is a few lines of Python, about 0.5 µs, so the GIL is held for 0.1 to 0.2 ms."""
PAUSE_S = 0.0002


def yield_gil() -> None:
    """Sleep, so that the training thread can take the GIL."""
    time.sleep(PAUSE_S)


class GilYielder:
    """Count the items that one thread works on, and yield the GIL after every `SLICE_ITEMS` of them.

    Args:
        pause: Releases the GIL.
    """

    def __init__(self, pause: Callable[[], None] = yield_gil) -> None:
        self._pause = pause
        self._left = SLICE_ITEMS

    def __call__(self, items: Collection[Item]) -> Iterable[Item]:
        """Iterate over items; consecutive and nested loops are counted together."""
        if len(items) <= self._left:
            self._left -= len(items)
            return items
        return chain.from_iterable(self._slices(iter(items)))

    def spend(self, items: int) -> None:
        """Count items that were worked on outside of a loop over this object; more than a slice yields once."""
        self._left -= items
        if self._left <= 0:
            self._yield()

    def _slices(self, source: Iterator[Item]) -> Iterator[Sequence[Item]]:
        while True:
            if self._left <= 0:  # a nested loop may have used up the slice
                self._yield()
            items = tuple(islice(source, max(1, self._left)))  # a signal handler may have used up the slice
            if not items:
                return
            self._left -= len(items)
            yield items

    def _yield(self) -> None:
        self._pause()
        self._left = SLICE_ITEMS  # after the pause, during which a signal handler may use this object
