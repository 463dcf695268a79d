"""Many evaluations under one span of the user's: the first ten as they are, the rest as one.

A request that generates a thousand tokens runs a thousand forwards; its trace must still open.
"""

from dataclasses import replace

from torchotel._records import Unit

MOST_EVALUATIONS = 10


class EvaluationFold:
    """Keep one evaluation for each thread that stands for all from the eleventh on."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[tuple[int, int], int]] = {}
        self._pending: dict[int, Unit] = {}

    def take(self, unit: Unit) -> list[Unit]:
        """Return what is to be built now: the record, what was folded before it, or nothing."""
        if unit.kind != "evaluation" or unit.user_span is None or unit.grad:
            return [unit]
        span = (unit.user_span.trace_id, unit.user_span.span_id)
        last, count = self._counts.get(unit.thread, (span, 0))
        ready: list[Unit] = []
        if last != span:
            count = 0
            ready = self._release(unit.thread)
        self._counts[unit.thread] = (span, count + 1)
        if count < MOST_EVALUATIONS or unit.identity is not None:  # spans of the user's are below it
            return [*ready, unit]
        self._fold(unit)
        return ready

    def rest(self) -> list[Unit]:
        """Return what is folded so far."""
        return [unit for thread in list(self._pending) for unit in self._release(thread)]

    def _fold(self, unit: Unit) -> None:
        folded = self._pending.get(unit.thread)
        if folded is None:
            folded = replace(unit, phases=[], calls=[], stamps=[], registrations=[], detailed=False, reason=None)
            self._pending[unit.thread] = folded
        folded.end_ns = unit.end_ns + unit.unix_offset_ns - folded.unix_offset_ns
        folded.folded += 1
        folded.folded_ns += unit.end_ns - unit.start_ns
        folded.error = folded.error or unit.error

    def _release(self, thread: int) -> list[Unit]:
        unit = self._pending.pop(thread, None)
        return [] if unit is None else [unit]
