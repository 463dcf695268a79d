"""Numbers by which all ranks of a training name the same step, without communication."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torchotel._records import Alignment
from torchotel.capture.collectives import collectives_run
from torchotel.capture.torch_internals import default_group

GROUP_BITS = 40
"""Collectives of one default process group, as a power of two; a later group begins with the next number above."""


class StepAlignment:
    """Align the steps of this rank with those of the other ranks.

    The ranks of the default process group have run the same collectives of it when the same step begins. A count of
    steps would drift if one rank evaluates more. Programs that run no such collective, as on a mesh of two dimensions,
    are aligned by their steps since the last one.

    Args:
        on_group: Called on the training thread when a step begins with another default group than the last step.
    """

    def __init__(self, on_group: Callable[[], None]) -> None:
        self._on_group = on_group
        self._collectives, self._first_step = -1, 0
        """The number of collectives at the last step, and the number of the first step that began with it."""
        self._group: weakref.ref[object] | None = None
        self._groups = -1
        """Default groups before the present one."""

    def of_step(self, number: int) -> Alignment | None:
        """Return the alignment of a step that begins now; None without a process group of several ranks.

        Args:
            number: The number of the step on this rank.
        """
        group = default_group()
        count = None if group is None else collectives_run(group)
        if count is None:
            return None
        if self._group is None or self._group() is not group:
            self._group, self._groups = weakref.ref(group), self._groups + 1
            self._on_group()
        collectives = (self._groups << GROUP_BITS) + count
        if collectives != self._collectives:
            self._collectives, self._first_step = collectives, number
        return collectives, number - self._first_step
