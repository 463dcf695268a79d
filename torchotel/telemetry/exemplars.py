"""Examples of what a histogram counted: steps whose traces can be looked at."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

MOST_PENDING = 4096  # steps that wait for their trace; those of dropped traces never come


class Exemplar(NamedTuple):
    """One observation, and the span that it was of."""

    value: float
    unix_s: float
    trace_id: int
    span_id: int


class Exemplars:
    """Keep the last step of each bucket whose trace arrived; one that was dropped would lead nowhere."""

    def __init__(self) -> None:
        # A plain dictionary takes ever longer to find the first of its entries, once those before it are gone.
        self._pending: OrderedDict[int, tuple[int, Exemplar]] = OrderedDict()
        self._arrived: dict[int, Exemplar] = {}

    def expect(self, bucket: int, exemplar: Exemplar) -> None:
        """Take note of a step whose trace is about to be sent."""
        if len(self._pending) >= MOST_PENDING:
            self._pending.popitem(last=False)
        self._pending[exemplar.trace_id] = bucket, exemplar

    def arrive(self, traces: Iterable[int]) -> None:
        """Take note of traces that reached their destination."""
        for trace_id in traces:
            found = self._pending.pop(trace_id, None)
            if found is not None:
                bucket, exemplar = found
                self._arrived[bucket] = exemplar

    def read(self) -> dict[int, Exemplar]:
        """Return one for each bucket that has one."""
        return dict(self._arrived)
