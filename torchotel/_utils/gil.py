"""Work in slices, so that the training thread gets the GIL in between."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import TypeVar

Item = TypeVar("Item")

SLICE_ITEMS = 256
"""Items that are worked on without a rest, each by a few lines of Python: some 0.1 to 0.2 ms."""


class GilYielder:
    """Iterate, and rest whenever a slice is full: items of one loop after the other count together; on one thread.

    Args:
        rest: Lets go of the GIL.
    """

    def __init__(self, rest: Callable[[], None] = lambda: None) -> None:
        self._rest = rest
        self._room = SLICE_ITEMS

    def __call__(self, items: Collection[Item]) -> Iterable[Item]:
        """Give all items, as they are where the slice has room for them."""
        if len(items) <= self._room:
            self._room -= len(items)
            return items
        return chain.from_iterable(self._slices(iter(items)))

    def _slices(self, source: Iterator[Item]) -> Iterator[Sequence[Item]]:
        while True:
            if not self._room:  # loops inside of this one count as well
                self._rest()
                self._room = SLICE_ITEMS  # not before: a signal's handler may iterate meanwhile
            taken = tuple(islice(source, self._room))
            if not taken:
                return
            self._room -= len(taken)
            yield taken
