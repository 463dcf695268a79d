"""The worker thread: takes finished steps out of the buffer and passes them on, and has the exporters send."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchotel._records import Record, Recordable, StepRecord
from torchotel._utils.faults import Guard, Warn
from torchotel.exporters.base import TraceExporter
from torchotel.worker.buffer import Buffer
from torchotel.worker.pipeline import Pipeline

INTERVAL_S = 0.5
LAST_RECORD_S = 2.0
"""Longest wait for the one record that is being built when the time is up."""

BEHIND = (
    "steps come faster than their spans can be built: the oldest are dropped, for now those of %d spans, and are in no "
    "metric either (`spans_dropped` in stats() counts on). Record fewer of them in detail: detail=n takes every n-th"
)


@dataclass(slots=True, eq=False)
class _Flush:
    deadline_s: float
    done: threading.Event = field(default_factory=threading.Event)
    complete: bool = False


class Worker:
    """Run everything that comes after the waist on one thread.

    Args:
        buffer: Where finished steps wait.
        exporters: Where traces go.
        pipeline: Processes each record.
        on_record: Called with each record; None: not called.
        guard: Counts internal errors.
        warn: Called with what the user is to know.
    """

    def __init__(
        self,
        buffer: Buffer,
        exporters: Sequence[TraceExporter],
        pipeline: Pipeline,
        *,
        on_record: Callable[[Record], None] | None,
        guard: Guard,
        warn: Warn,
    ) -> None:
        self._buffer, self._exporters, self._pipeline = buffer, exporters, pipeline
        self._flushes: queue.SimpleQueue[_Flush] = queue.SimpleQueue()
        self.guard, self._on_record, self._warn = guard, on_record, warn
        self._ended = False
        self._deadline_s = math.inf
        self._dropped_by_flush = 0  # by the last one
        self.counts = {"step": 0, "evaluation": 0}
        self.detailed = 0
        self._thread = threading.Thread(target=self._run, name="torchotel-worker", daemon=True)

    @property
    def spans_recorded(self) -> int:
        """All spans, those that were dropped among them."""
        return self.spans_dropped + self._pipeline.spans_recorded

    @property
    def spans_dropped(self) -> int:
        """Spans of records that were dropped before an exporter got them."""
        return self._pipeline.spans_dropped

    @property
    def spans_sampled_out(self) -> int:
        """Spans that a sampler left out."""
        return self._pipeline.spans_sampled_out

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def flush(self, timeout_s: float) -> bool:
        """Bring out all that is in the buffer; False where it could not be in time, or some was lost since the last."""
        if not self._thread.is_alive():
            return False
        request = _Flush(time.monotonic() + timeout_s)
        self._flushes.put(request)
        self._buffer.bell.ring()
        return request.done.wait(timeout_s) and request.complete

    def stop(self, timeout_s: float) -> None:
        """Empty the buffer and end the thread; what is not built in time is dropped. The exporters stay."""
        self._deadline_s = time.monotonic() + timeout_s
        self._ended = True
        self._buffer.bell.ring()
        self._thread.join(timeout_s + LAST_RECORD_S)

    def _run(self) -> None:
        drain, answer = self.guard.guarded(self._drain), self.guard.guarded(self._answer_flushes)
        while not self._ended:
            self._buffer.bell.wait(INTERVAL_S)
            drain()
            answer()
        drain()
        self.guard.guarded(self._pipeline.send_folded)()
        answer()

    def _answer_flushes(self) -> None:
        while not self._flushes.empty():
            request = self._flushes.get()
            self.guard.guarded(self._drain)()  # what was handed over before it was asked for
            self.guard.guarded(self._pipeline.send_folded)()
            complete = [self.guard.guarded(exporter.flush)(request.deadline_s) for exporter in self._exporters]
            request.complete = all(complete) and self.spans_dropped == self._dropped_by_flush
            self._dropped_by_flush = self.spans_dropped
            request.done.set()  # whoever waits must have an answer

    def _drain(self) -> None:
        while (handed := self._buffer.take()) is not None:
            try:
                self._export(handed) if time.monotonic() < self._deadline_s else self._leave_out(handed)
            except Exception:  # noqa: BLE001  # the next record may be good
                self.guard.fault()
                self._pipeline.drop(handed.span_estimate())
        self.guard.guarded(self._pipeline.send_quiet)()
        pushed_out = self._buffer.take_dropped()
        if pushed_out:
            self._pipeline.drop(pushed_out)
            self._warn(BEHIND, pushed_out)
        for exporter in self._exporters:
            self.guard.guarded(exporter.push)()

    def _leave_out(self, handed: Recordable) -> None:
        self._count(handed)
        self._pipeline.drop(handed.span_estimate())

    def _export(self, handed: Recordable) -> None:
        record = handed.record()
        if self._on_record is not None:
            self._on_record(record)
        if isinstance(record, StepRecord) and (record.kind == "step" or record.counts_as_evaluation):
            self._count(handed)
        self._pipeline.take(record)

    def _count(self, handed: Recordable) -> None:
        if handed.kind in self.counts:
            self.counts[handed.kind] += 1
        self.detailed += handed.detailed and handed.kind == "step"
