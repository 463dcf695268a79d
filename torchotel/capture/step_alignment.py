"""Numbers by which all ranks of a training name the same step, without communication."""

from __future__ import annotations

from collections.abc import Callable

from torchotel._records import Alignment
from torchotel.capture.torch_internals import collective_number


class StepAlignment:
    """Align the steps of this rank with those of the other ranks.

    The ranks of the default process group have run the same collectives of it when the same step begins. A count of
    steps would drift if one rank evaluates more. Programs that run no such collective, as on a mesh of two dimensions,
    are aligned by their steps since the last one.

    Args:
        sent_or_received: Returns how many sends and receives the number of collectives includes; gloo counts them,
            and not all ranks take part.
    """

    def __init__(self, sent_or_received: Callable[[], int] = lambda: 0) -> None:
        self._sent_or_received = sent_or_received
        self._collective, self._first_step = -1, 0
        """The number of collectives at the last step, and the number of the first step that began with it."""

    def of_step(self, number: int) -> Alignment | None:
        """Return the alignment of a step that begins now; None without a process group of several ranks.

        Args:
            number: The number of the step on this rank.
        """
        collective = collective_number()
        if collective is None:
            return None
        collective -= self._sent_or_received()
        if collective != self._collective:
            self._collective, self._first_step = collective, number
        return collective, number - self._first_step
