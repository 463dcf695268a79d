"""What becomes of a record: its metrics, its line, and its trace for the exporters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from torchotel._records import Log, Record, StepRecord
from torchotel._utils.faults import Guard, Warn
from torchotel._utils.gil import GilYielder
from torchotel.exporters.base import TraceExporter
from torchotel.exporters.run_file import RunFile, log_line, record_line
from torchotel.metrics.store import Metrics
from torchotel.sampling.tail import TailSampler
from torchotel.tracing.call_tree import CallTreeBuilder
from torchotel.tracing.diagnostics import BlindSpotDiagnostics, find_nonfinite
from torchotel.tracing.evaluation_folding import EvaluationFold
from torchotel.tracing.span import SpanContextSource, Trace
from torchotel.tracing.trace_builder import TraceBuilder, root_attributes, root_name, root_parent, trace_attributes


class Pipeline:
    """Process records one after the other, on the worker.

    Args:
        builder: Makes traces.
        exporters: Where the traces go.
        starter: Gives roots their ids, and says whether they are sampled.
        metrics: Counts every step and evaluation.
        sliced: Works through calls.
        on_step: Gets each step, and what it took of the worker's time.
        on_line: Gets the line of each step, for `metrics.jsonl`; None: nobody wants it.
        on_first: Called before the first record of each kind; before the first step it returns the trace of the run, on
            the rank that sends it.
        guard: Counts internal errors.
        warn: Called with what the user is to know.
    """

    def __init__(
        self,
        builder: TraceBuilder,
        exporters: Sequence[TraceExporter],
        starter: SpanContextSource,
        metrics: Metrics,
        sliced: GilYielder,
        *,
        on_step: Callable[[StepRecord, int], None],
        on_line: Callable[[Mapping[str, object]], None] | None,
        on_first: Callable[[Record], Trace | None],
        guard: Guard,
        warn: Warn,
    ) -> None:
        self._builder, self._starter, self._guard = builder, starter, guard
        self._on_line, self._on_first = on_line, on_first
        self._export_to = [guard.guarded(exporter.export) for exporter in exporters]
        self._measure = guard.guarded(metrics.add)  # what can't be counted is sent all the same
        self._measure_log = guard.guarded(metrics.log)
        self._look = guard.guarded(BlindSpotDiagnostics(warn, builder.templates.includes).look)
        self._on_step = guard.guarded(on_step)
        self._seen: set[str] = set()
        """Kinds of records."""
        self._fold, self._timer, self._keeper = EvaluationFold(), CallTreeBuilder(sliced), TailSampler()
        self.spans_recorded = 0
        """What was sent or sampled out."""
        self.spans_sampled_out = 0
        self.spans_dropped = 0
        """Spans of records that were dropped before an exporter got them; they are not in `spans_recorded`."""

    def record_to(self, run_file: RunFile) -> None:
        """Export to a run file, too, that was opened with the first record."""
        self._export_to.append(self._guard.guarded(run_file.export))
        self._on_line = run_file.step

    def take(self, record: Record) -> None:
        """Bring a record to all that read it."""
        kind = "log" if isinstance(record, Log) else record.kind
        if kind not in self._seen:
            self._seen.add(kind)
            run = self._on_first(record)
            if run is not None and not self._starter.off:
                self._send(run)
        if isinstance(record, Log):
            self._measure_log(record)
            if self._on_line is not None:
                self._on_line(log_line(record))
            return
        for unit in self._fold.add(record):
            began_ns = time.thread_time_ns()
            self._build(unit)
            if unit.kind == "step":
                self._on_step(unit, time.thread_time_ns() - began_ns)

    def send_folded(self) -> None:
        """Bring out the evaluations that wait for others to be folded with."""
        self._build_each(self._fold.pop_all())

    def send_quiet(self) -> None:
        """Bring out those that have waited for long."""
        self._build_each(self._fold.pop_quiet(time.perf_counter_ns()))

    def _build_each(self, units: Iterable[StepRecord]) -> None:
        for unit in units:
            try:
                self._build(unit)
            except Exception:  # noqa: BLE001  # the next unit may be good
                self._guard.fault()
                self.drop(unit.span_estimate())

    def drop(self, spans: int) -> None:
        """Count spans of a record that was dropped; without an exporter there are none."""
        if self._export_to:
            self.spans_dropped += spans

    def _build(self, unit: StepRecord) -> None:
        timed = self._timer.build(unit)
        self._look(unit, timed)
        nonfinite = find_nonfinite(unit, timed)
        late, parent = self._keeper.reason(unit, nonfinite), root_parent(unit)
        attributes = root_attributes(unit, late or unit.reason, nonfinite)
        root = unit.identity or self._starter.start(
            root_name(unit),
            parent,
            unit.start_ns + unit.unix_offset_ns,
            {**trace_attributes(unit), **attributes},
            unit.baggage,
        )
        if self._on_line is not None:
            self._on_line(record_line(unit, root.trace_id, nonfinite))
        # Below a caller's span that was not sampled nothing is kept: it would hang in the air.
        sent = root.sampled or (late is not None and self._starter.keeps_late and parent is None)
        self._measure(unit, timed, root if sent and self._export_to else None)
        if sent:
            self._send(self._builder.build(unit, timed, root, attributes))
        elif self._export_to:
            self.spans_recorded += unit.span_estimate()
            self.spans_sampled_out += unit.span_estimate()

    def _send(self, trace: Trace) -> None:
        if self._export_to:
            self.spans_recorded += len(trace.spans)
        for export in self._export_to:  # what one can't take, it counts itself
            export(trace)
