"""The worker thread: takes finished steps out of the buffer, builds their traces, gives them to the exporters."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torchotel._buffer import Buffer
from torchotel._guard import Guard
from torchotel._loading import Loading
from torchotel._records import HandedOver, Log, Record, Unit
from torchotel._warn import Warn
from torchotel.telemetry.evaluations import EvaluationFold
from torchotel.telemetry.keeping import Keeper
from torchotel.telemetry.lines import log_line, unit_line
from torchotel.telemetry.metrics import Metrics
from torchotel.telemetry.missing import Missing
from torchotel.telemetry.nonfinite import find_nonfinite
from torchotel.telemetry.roots import root_attributes, root_name, root_parent
from torchotel.telemetry.slices import Sliced
from torchotel.telemetry.spans import SpanStarter, Trace, TraceExporter
from torchotel.telemetry.timing import CallTimer
from torchotel.telemetry.traces import TraceBuilder, trace_attributes

Kind = TypeVar("Kind", bound=HandedOver)

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
        builder: Makes their traces.
        exporters: Where the traces go.
        starter: Gives roots their ids, and says whether they are sampled.
        metrics: Counts every step and evaluation.
        on_start: Called first, on the thread.
        on_record: Gets each record; None: nobody wants it.
        on_step: Gets each step, whole.
        on_line: Gets the line of each step, for `metrics.jsonl`; None: nobody wants it.
        on_first: Called before the first unit of each kind; before the first step it returns the trace of the run, on
            the rank that sends it.
        warn: Called with what the user is to know.
        sliced: Works through calls.
    """

    def __init__(
        self,
        buffer: Buffer,
        builder: TraceBuilder,
        exporters: Sequence[TraceExporter],
        starter: SpanStarter,
        metrics: Metrics,
        on_start: Callable[[], None],
        on_record: Callable[[Record], None] | None,
        on_step: Callable[[Unit], None],
        on_line: Callable[[Mapping[str, object]], None] | None,
        on_first: Callable[[Unit], Trace | None],
        warn: Warn,
        sliced: Sliced,
    ) -> None:
        self._buffer, self._builder, self._exporters = buffer, builder, exporters
        self._starter, self._on_line, self._on_first = starter, on_line, on_first
        self._flushes: queue.SimpleQueue[_Flush] = queue.SimpleQueue()
        self.guard = Guard("the worker", limit=1000)
        self._export_to = [self.guard.guarded(exporter.export) for exporter in exporters]
        self._on_start = self.guard.guarded(on_start)
        self._on_record = on_record
        self._measure = self.guard.guarded(metrics.add)  # what can't be counted is sent all the same
        self._look = self.guard.guarded(Missing(warn, builder.templates.includes).look)
        self._measure_log = self.guard.guarded(metrics.log)
        self._on_step = self.guard.guarded(on_step)
        self._ended = False
        self._deadline_s = math.inf
        self._seen: set[str] = set()
        """Kinds of units."""
        self.spans_recorded = 0
        self.spans_dropped = 0
        self.spans_sampled_out = 0
        self._fold = EvaluationFold()
        self._timer = CallTimer(sliced)
        self._keeper, self._warn = Keeper(), warn
        self.counts = {"step": 0, "evaluation": 0}
        self.detailed = 0
        self._thread = threading.Thread(target=self._run, name="torchotel-worker", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._loading = Loading()
        self._thread.start()

    def flush(self, timeout_s: float) -> bool:
        """Bring out all that is in the buffer; False where it could not be in time."""
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
        with self._loading:
            self._on_start()
            for exporter in self._exporters:
                self.guard.guarded(exporter.prepare)()
        drain, answer = self.guard.guarded(self._drain), self.guard.guarded(self._answer_flushes)
        while not self._ended:
            self._buffer.bell.wait(INTERVAL_S)
            drain()
            answer()
        drain()
        self.guard.guarded(self._send_folded)()
        answer()

    def _send_folded(self) -> None:
        self._build_each(self._fold.rest())

    def _send_quiet(self) -> None:
        self._build_each(self._fold.quiet(time.perf_counter_ns()))

    def _build_each(self, units: Iterable[Unit]) -> None:
        for unit in units:
            self._or_lost(self._build, unit)

    def _answer_flushes(self) -> None:
        while not self._flushes.empty():
            request = self._flushes.get()
            self.guard.guarded(self._drain)()  # what was handed over before it was asked for
            self.guard.guarded(self._send_folded)()
            complete = [self.guard.guarded(exporter.flush)(request.deadline_s) for exporter in self._exporters]
            request.complete = all(complete)  # whoever waits must have an answer
            request.done.set()

    def _drain(self) -> None:
        while (handed := self._buffer.take()) is not None:
            self._or_lost(self._export if time.monotonic() < self._deadline_s else self._leave_out, handed)
        self.guard.guarded(self._send_quiet)()
        pushed_out = self._buffer.take_dropped()
        if pushed_out:
            self._lost(pushed_out)
            self._warn(BEHIND, pushed_out)
        for exporter in self._exporters:
            self.guard.guarded(exporter.push)()

    def _or_lost(self, export: Callable[[Kind], None], handed: Kind) -> None:
        """Export what was handed over; what can't be must not end the thread."""
        try:
            export(handed)
        except Exception:  # noqa: BLE001  # whatever it was, the next may be good
            self.guard.fault()
            self._lost(handed.span_estimate())

    def _lost(self, spans: int) -> None:
        if not self._exporters:
            return
        self.spans_recorded += spans
        self.spans_dropped += spans

    def _leave_out(self, handed: HandedOver) -> None:
        self._count(handed)
        self._lost(handed.span_estimate())

    def _export(self, handed: HandedOver) -> None:
        record = handed.record()
        if self._on_record is not None:
            self._on_record(record)
        if isinstance(record, Log):
            self._measure_log(record)
            if self._on_line is not None:
                self._on_line(log_line(record))
            return
        self._count(record)
        if record.kind not in self._seen:
            self._seen.add(record.kind)
            with Loading():
                run = self._on_first(record)
            if run is not None and not self._starter.off:
                self._send(run)
        if record.kind == "step":
            self._on_step(record)
        for unit in self._fold.take(record):
            self._build(unit)

    def _count(self, handed: HandedOver) -> None:
        if handed.kind in self.counts:
            self.counts[handed.kind] += 1
        self.detailed += handed.detailed and handed.kind == "step"

    def _build(self, unit: Unit) -> None:
        timed = self._timer.time(unit)
        self._look(unit, timed)
        nonfinite = find_nonfinite(unit, timed)
        late, parent = self._keeper.reason(unit, nonfinite), root_parent(unit)
        attributes = root_attributes(unit, late or unit.reason, nonfinite)
        root = unit.identity or self._starter.start(
            root_name(unit), parent, unit.start_ns + unit.unix_offset_ns, {**trace_attributes(unit), **attributes}
        )
        if self._on_line is not None:
            self._on_line(unit_line(unit, root.trace_id, nonfinite))
        # Below a caller's span that was not sampled nothing is kept: it would hang in the air.
        sent = root.sampled or (late is not None and self._starter.keeps_late and parent is None)
        self._measure(unit, timed, root if sent and self._exporters else None)
        if sent:
            self._send(self._builder.build(unit, timed, root, attributes))
        elif self._exporters:
            self.spans_recorded += unit.span_estimate()
            self.spans_sampled_out += unit.span_estimate()

    def _send(self, trace: Trace) -> None:
        if self._exporters:
            self.spans_recorded += len(trace.spans)
        for export in self._export_to:  # what one can't take, it counts itself
            export(trace)
