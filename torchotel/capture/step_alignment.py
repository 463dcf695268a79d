"""Numbers by which all ranks of a training name the same step, without communication."""

from __future__ import annotations

from collections.abc import Callable

from torchotel._records import Alignment
from torchotel.capture.torch_internals import default_group, default_group_id, has_sequence, sequence_of

GROUP_BITS = 40
"""Collectives of one default process group, as a power of two; a later group begins with the next number above."""


class StepAlignment:
    """Align the steps of this rank with those of the other ranks.

    The ranks of the default process group have run the same collectives of it when the same step begins. A count of
    steps would drift if one rank evaluates more. Programs that run no such collective, as on a mesh of two dimensions,
    are aligned by their steps since the last one.

    Args:
        sent_or_received: Returns how many sends and receives the number of collectives includes; gloo counts them,
            and not all ranks take part.
        on_group: Called on the training thread when a step begins with another default group than the last step.
    """

    def __init__(self, sent_or_received: Callable[[], int], on_group: Callable[[], None] = lambda: None) -> None:
        self._sent_or_received, self._on_group = sent_or_received, on_group
        self._collective, self._first_step = -1, 0
        """The number of collectives at the last step, and the number of the first step that began with it."""
        self._group_id: object = None
        self._groups = -1
        """Default groups before the present one."""

    def of_step(self, number: int) -> Alignment | None:
        """Return the alignment of a step that begins now; None without a process group of several ranks.

        Args:
            number: The number of the step on this rank.
        """
        group = default_group()
        if group is None or not has_sequence(group):
            return None
        group_id = default_group_id()
        if group_id != self._group_id:
            self._group_id, self._groups = group_id, self._groups + 1
            self._on_group()
        collective = (self._groups << GROUP_BITS) + sequence_of(group) - self._sent_or_received()
        if collective != self._collective:
            self._collective, self._first_step = collective, number
        return collective, number - self._first_step
