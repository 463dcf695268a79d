"""The worker thread: drains the buffer through the pipeline, and answers flushes."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchotel._collectives import CollectiveReading
from torchotel._records import Record, Recordable, StepRecord
from torchotel._utils.faults import Guard, Warn
from torchotel.exporters.base import TraceExporter
from torchotel.worker.buffer import Buffer
from torchotel.worker.collective_watch import CollectiveWatch
from torchotel.worker.pipeline import Pipeline

INTERVAL_S = 0.5
LAST_RECORD_S = 2.0
"""Further time at the end of a shutdown for the record that is being processed."""

BEHIND = (
    "records of %d spans were dropped and are in no metric, because the buffer before the worker was full "
    "(`spans_dropped` in stats() counts all). Record fewer steps in detail: detail=n records every n-th"
)

NO_THREAD = "No thread can be started, so spans are exported at the end of torchotel only"

_logger = logging.getLogger("torchotel")


@dataclass(slots=True, eq=False)
class _Flush:
    done: threading.Event = field(default_factory=threading.Event)
    complete: bool = False


class Worker:
    """Process all records on one thread.

    Args:
        buffer: Holds the finished records.
        exporters: Are flushed and pushed.
        pipeline: Processes each record.
        watch: Reads the flight recorder if no record arrives.
        on_record: Called with each record; None: not called.
        guard: Counts internal errors.
        warn: Logs warnings to the user.
    """

    def __init__(
        self,
        buffer: Buffer,
        exporters: Sequence[TraceExporter],
        pipeline: Pipeline,
        watch: CollectiveWatch,
        *,
        on_record: Callable[[Record], None] | None,
        guard: Guard,
        warn: Warn,
    ) -> None:
        self._buffer, self._exporters, self._pipeline = buffer, exporters, pipeline
        self._watch, self._readings = watch, queue.SimpleQueue[CollectiveReading]()
        self._flushes: queue.SimpleQueue[_Flush] = queue.SimpleQueue()
        self.guard, self._on_record, self._warn = guard, on_record, warn
        self._ended = False
        self.lag_ns: int | None = None
        """Time from the end of the last processed step until it was processed; None: there was none."""
        self._deadline_s = math.inf
        self._dropped_by_flush = 0
        """`spans_dropped` at the last flush."""
        self.counts = {"step": 0, "evaluation": 0}
        self.detailed = 0
        self._thread = threading.Thread(target=self._run, name="torchotel-worker", daemon=True)

    @property
    def spans_recorded(self) -> int:
        """All spans, including dropped ones."""
        return self.spans_dropped + self._pipeline.spans_recorded

    @property
    def spans_dropped(self) -> int:
        """Spans of records that were dropped before an exporter got them."""
        return self._pipeline.spans_dropped

    @property
    def spans_sampled_out(self) -> int:
        """Spans that were sampled out."""
        return self._pipeline.spans_sampled_out

    def start(self) -> None:
        """Start the thread; if none can be started, as at the end of the interpreter, `stop` processes the records."""
        try:
            self._thread.start()
        except RuntimeError:
            _logger.warning(NO_THREAD)

    def add_reading(self, reading: CollectiveReading) -> None:
        """Process a reading of the flight recorder, which another process has made, on the thread."""
        self._readings.put(reading)
        self._buffer.bell.ring()

    def flush(self, timeout_s: float) -> bool:
        """Drain the buffer and flush; return False on timeout, or if spans were dropped since the last flush.

        The calling thread waits for the exporters, so that the worker goes on.
        """
        if not self._thread.is_alive():
            return False
        deadline_s, request = time.monotonic() + timeout_s, _Flush()
        self._flushes.put(request)
        self._buffer.bell.ring()
        if not request.done.wait(timeout_s):
            return False
        exported = [self.guard.guarded(exporter.flush)(deadline_s) for exporter in self._exporters]
        return request.complete and all(exported)

    def stop(self, timeout_s: float) -> None:
        """Drain the buffer and end the thread; records that are left at the timeout are dropped."""
        self._deadline_s = time.monotonic() + timeout_s
        self._ended = True
        if self._thread.ident is None:
            self._run()
            return
        self._buffer.bell.ring()
        self._thread.join(timeout_s + LAST_RECORD_S)
        while self._thread.is_alive() and (pending := self._buffer.pop_oldest()) is not None:  # it is blocked
            self._drop(pending)

    def _run(self) -> None:
        drain, answer = self.guard.guarded(self._drain), self.guard.guarded(self._answer_flushes)
        check, add_readings = self.guard.guarded(self._watch.check), self.guard.guarded(self._add_readings)
        while not self._ended:
            self._buffer.bell.wait(INTERVAL_S)
            drain()
            answer()
            if (reading := check(time.monotonic())) is not None:
                self._readings.put(reading)
            add_readings()
        drain()
        add_readings()
        self.guard.guarded(self._pipeline.export_folded)()
        answer()

    def _answer_flushes(self) -> None:
        while not self._flushes.empty():
            request = self._flushes.get()
            self.guard.guarded(self._drain)()  # records from before the flush
            self.guard.guarded(self._pipeline.export_folded)()
            for exporter in self._exporters:
                self.guard.guarded(exporter.push)()
            request.complete = self.spans_dropped == self._dropped_by_flush
            self._dropped_by_flush = self.spans_dropped
            request.done.set()  # also after an error: flush() waits for it

    def _add_readings(self) -> None:
        while not self._readings.empty():
            self._pipeline.add_reading(self._readings.get())

    def _drain(self) -> None:
        while (pending := self._buffer.pop_oldest()) is not None:
            try:
                self._process(pending) if time.monotonic() < self._deadline_s else self._drop(pending)
            except BaseException:  # noqa: BLE001  # the next record may be good; a sampler may call sys.exit()
                self.guard.fault()
                self._pipeline.drop(pending.span_estimate())
        self.guard.guarded(self._pipeline.export_quiet)()
        dropped = self._buffer.pop_dropped()
        if dropped:
            self._pipeline.drop(dropped)
            self._warn(BEHIND, dropped)
        for exporter in self._exporters:
            self.guard.guarded(exporter.push_due)()

    def _drop(self, pending: Recordable) -> None:
        self._count(pending)
        self._pipeline.drop(pending.span_estimate())

    def _process(self, pending: Recordable) -> None:
        record = pending.record()
        self._watch.note_record(time.monotonic())
        if self._on_record is not None:
            self._on_record(record)
        if isinstance(record, StepRecord) and (record.kind == "step" or record.counts_as_evaluation):
            self._count(pending)
        self._pipeline.process(record)
        if isinstance(record, StepRecord):
            self.lag_ns = time.perf_counter_ns() - record.end_ns
            if record.kind == "step":
                self._watch.note_step((record.end_ns - record.start_ns) / 1e9)

    def _count(self, pending: Recordable) -> None:
        if pending.kind in self.counts:
            self.counts[pending.kind] += 1
        self.detailed += pending.detailed and pending.kind == "step"
