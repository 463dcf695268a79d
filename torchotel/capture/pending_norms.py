"""Gradient norms of a step while they are being computed, and which of them each optimizer got."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from typing import TypeAlias

from torch import Tensor

from torchotel._records import GradientNorms, ModuleInfo
from torchotel.capture.norms import Norms, combined


class GradientReading:
    """The norms of gradients that were read at one moment.

    Args:
        owners: The module of each gradient, in the order of the model's modules.
        norms: Of each gradient; None if they can't be known.
    """

    __slots__ = ("_norms", "_owners")

    def __init__(self, owners: list[ModuleInfo], norms: Norms | None) -> None:
        self._owners, self._norms = owners, norms

    def ready(self) -> bool:
        """Return whether the norms are computed, without waiting; for a training thread."""
        return self._norms is None or self._norms.ready()

    def wait(self) -> None:
        """Wait until the norms are computed."""
        if self._norms is not None:
            self._norms.wait()

    def owners(self) -> list[ModuleInfo]:
        """Return the module of each gradient."""
        return self._owners

    def values(self) -> list[float | None] | None:
        """Return the norm of each gradient, None for an unknown one; None if they are not ready or can't be known."""
        return None if self._norms is None else self._norms.values()


GradientState: TypeAlias = tuple[weakref.ref[Tensor], int | None, GradientReading, int]
"""A gradient whose norm was read, its version then, and where its norm is found. Version None: clipped since."""


class SelectedNorms:
    """The norms of some gradients of one or several readings.

    Args:
        places: The places of those gradients in each reading.
    """

    __slots__ = ("_places",)

    def __init__(self, places: Mapping[GradientReading, Collection[int]]) -> None:
        self._places = places

    def ready(self) -> bool:
        """Return whether all of them are computed, without waiting; for a training thread."""
        return all(reading.ready() for reading in self._places)

    def wait(self) -> None:
        """Wait until all of them are computed."""
        for reading in self._places:
            reading.wait()

    def owners(self) -> Iterator[ModuleInfo]:
        """Yield the module of each gradient."""
        for reading, places in self._places.items():
            owners = reading.owners()
            yield from (owners[place] for place in places)

    def values(self) -> list[tuple[ModuleInfo, float]] | None:
        """Return the module and the norm of each gradient with a known norm; None if a reading is not ready."""
        found = []
        for reading, places in self._places.items():
            values, owners = reading.values(), reading.owners()
            if values is None:
                return None
            found += [(owners[place], value) for place in places if (value := values[place]) is not None]
        return found


AFTER_BACKWARD = None
"""Key of the norms that the last backward left."""

NormsByOptimizer: TypeAlias = Mapping[Hashable, SelectedNorms]
"""Norms by the optimizer that got the gradients, and at `AFTER_BACKWARD` those that the last backward left."""


def step_norms(parts: Iterable[NormsByOptimizer]) -> GradientNorms | None:
    """Return the norms of a step's gradients as its optimizers got them, or the last backward's if none stepped.

    Args:
        parts: The norms of the step's parts, in order. The last step of each optimizer counts. Of a sharded parameter
            this rank's shard counts, which needs no collective.
    """
    last: dict[Hashable, SelectedNorms] = {}
    order: dict[ModuleInfo, None] = {}
    for part in parts:
        last.update(part)
        if AFTER_BACKWARD in part:
            order.update(dict.fromkeys(part[AFTER_BACKWARD].owners()))
    if len(last) > 1:
        last.pop(AFTER_BACKWARD, None)
    modules: dict[ModuleInfo, list[float]] = {owner: [] for owner in order}
    for norms in last.values():
        values = norms.values()
        if values is None:
            return None
        for owner, value in values:
            modules.setdefault(owner, []).append(value)
    known = {owner: combined(own) for owner, own in modules.items() if own}
    return GradientNorms(combined([*known.values()]), tuple(known.items())) if known else None
