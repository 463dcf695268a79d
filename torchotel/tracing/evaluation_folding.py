"""Many evaluations under one span of the user's: the first ten as they are, the rest as one.

A request that generates a thousand tokens runs a thousand forwards; its trace must still open. Requests take turns on
a thread, and one may run on several, so it is their spans that are told apart.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from torchotel._limits import MAX_FOLLOWING_EVALUATIONS
from torchotel._records import StepRecord

MAX_SPANS = 1024
"""Spans of the user's that are remembered; one that was forgotten begins anew."""
QUIET_NS = 2_000_000_000
"""After so long without a further evaluation what was folded is sent: the next request may be hours away."""

SpanKey: TypeAlias = tuple[int, int]


class EvaluationFold:
    """Keep one evaluation for each span of the user's that stands for all from the eleventh on."""

    def __init__(self) -> None:
        self._counts: dict[SpanKey, int] = {}
        """The last that was counted comes last."""
        self._folded: dict[SpanKey, StepRecord] = {}

    def take(self, unit: StepRecord) -> list[StepRecord]:
        """Return what is to be built now: the record, what was folded and is forgotten, or nothing."""
        if unit.kind != "evaluation" or unit.user_span is None or unit.grad:
            return [unit]
        span = (unit.user_span.trace_id, unit.user_span.span_id)
        count = self._counts[span] = self._counts.pop(span, 0) + 1
        ready = self._forget() if len(self._counts) > MAX_SPANS else []
        if count <= MAX_FOLLOWING_EVALUATIONS or _stands_for_itself(unit):
            return [*ready, unit]
        self._fold(span, unit)
        return ready

    def quiet(self, now_ns: int) -> list[StepRecord]:
        """Return what is folded of spans that nothing has come of for a while.

        Args:
            now_ns: The time as records have it.
        """
        spans = [span for span, unit in self._folded.items() if now_ns - unit.end_ns > QUIET_NS]
        return [self._folded.pop(span) for span in spans]

    def rest(self) -> list[StepRecord]:
        """Return what is folded so far."""
        units = list(self._folded.values())
        self._folded.clear()
        return units

    def _fold(self, span: SpanKey, unit: StepRecord) -> None:
        folded = self._folded.get(span)
        if folded is None:
            folded = replace(unit, phases=[], calls=[], stamps=[], registrations=[], device_times=[])
            folded.detailed, folded.reason = False, None
            self._folded[span] = folded
        folded.end_ns = max(folded.end_ns, unit.end_ns + unit.unix_offset_ns - folded.unix_offset_ns)
        folded.folded += 1
        folded.folded_ns += unit.end_ns - unit.start_ns

    def _forget(self) -> list[StepRecord]:
        """Forget the span that was counted longest ago; return what was folded of it."""
        oldest = next(iter(self._counts))
        del self._counts[oldest]
        unit = self._folded.pop(oldest, None)
        return [] if unit is None else [unit]


def _stands_for_itself(unit: StepRecord) -> bool:
    """Tell whether spans of the user's are below it, or it says where it failed."""
    return unit.identity is not None or unit.error is not None
