"""Fold the evaluations under one user span: the first ten get spans of their own, the rest fold into one.

A request that generates a thousand tokens runs a thousand forwards, and backends must still be able to show its trace.
Requests take turns on one thread, and one request may run on several threads, so evaluations are folded by user span.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from torchotel._limits import MAX_FOLLOWING_EVALUATIONS
from torchotel._records import StepRecord

MAX_SPANS = 1024
"""User spans whose evaluations are counted; if a forgotten span gets another evaluation, its count begins at 1."""
QUIET_NS = 2_000_000_000
"""Time without a further evaluation after which the folded record is returned: a next request may never come."""

SpanKey: TypeAlias = tuple[int, int]


class EvaluationFold:
    """Count the evaluations of each user span, and hold one record for all from the eleventh on."""

    def __init__(self) -> None:
        self._counts: dict[SpanKey, int] = {}
        """The span that was counted last is the last key."""
        self._folded: dict[SpanKey, StepRecord] = {}

    def add(self, record: StepRecord) -> list[StepRecord]:
        """Return the records to build now: this one unless it was folded, and the folded record of a forgotten span."""
        if record.kind != "evaluation" or record.user_span is None or record.grad:
            return [record]
        span = (record.user_span.trace_id, record.user_span.span_id)
        count = self._counts[span] = self._counts.pop(span, 0) + 1
        ready = self._forget_oldest() if len(self._counts) > MAX_SPANS else []
        if count <= MAX_FOLLOWING_EVALUATIONS or _is_unfoldable(record):
            return [*ready, record]
        self._fold(span, record)
        return ready

    def pop_quiet(self, now_ns: int) -> list[StepRecord]:
        """Remove and return the folded records of spans that have had no evaluation for `QUIET_NS`.

        Args:
            now_ns: The time, by the clock of records.
        """
        spans = [span for span, record in self._folded.items() if now_ns - record.end_ns > QUIET_NS]
        return [self._folded.pop(span) for span in spans]

    def pop_all(self) -> list[StepRecord]:
        """Remove and return all folded records."""
        records = list(self._folded.values())
        self._folded.clear()
        return records

    def _fold(self, span: SpanKey, record: StepRecord) -> None:
        folded = self._folded.get(span)
        if folded is None:
            folded = replace(record, phases=[], calls=[], timestamps=[], registrations=[], device_times=[])
            folded.detailed, folded.reason = False, None
            self._folded[span] = folded
        folded.end_ns = max(folded.end_ns, record.end_ns + record.unix_offset_ns - folded.unix_offset_ns)
        folded.folded += 1
        folded.folded_ns += record.end_ns - record.start_ns

    def _forget_oldest(self) -> list[StepRecord]:
        """Forget the span that was counted longest ago; return its folded record, if it has one."""
        oldest = next(iter(self._counts))
        del self._counts[oldest]
        record = self._folded.pop(oldest, None)
        return [] if record is None else [record]


def _is_unfoldable(record: StepRecord) -> bool:
    """Return whether user spans may be below the evaluation's span, or the evaluation failed."""
    return record.identity is not None or record.error is not None
