"""The pipeline of a record: metrics, the line of the run file, and the trace for the exporters."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from torchotel._collectives import CollectiveReading, encode_reading
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
from torchotel.tracing.trace_builder import TraceBuilder, root_attributes, root_parent, trace_attributes


class PipelineListener(Protocol):
    """The events of a pipeline; each method is called on the worker."""

    def before_first(self, record: Record) -> Trace | None:
        """Prepare for the first record of a kind.

        Returns:
            Before the first step, on the rank that exports it, the trace of the run; else None.
        """

    def step_processed(self, step: StepRecord, worker_ns: int) -> None:
        """Observe a step, and the CPU time that the worker spent on it."""


class Pipeline:
    """Process records one after the other, on the worker.

    Args:
        builder: Builds the traces.
        exporters: Export the traces.
        id_source: Fixes the ids of root spans and makes the head sampling decision.
        metrics: Counts every step and evaluation.
        yielder: Iterates over calls.
        listener: Called before the first record of each kind and after each step.
        run_file: Gets the line of each record for `metrics.jsonl`; None: no run is recorded.
        guard: Counts internal errors.
        warn: Logs warnings to the user.
    """

    def __init__(
        self,
        builder: TraceBuilder,
        exporters: Sequence[TraceExporter],
        id_source: SpanContextSource,
        metrics: Metrics,
        yielder: GilYielder,
        *,
        listener: PipelineListener,
        run_file: RunFile | None,
        guard: Guard,
        warn: Warn,
    ) -> None:
        self._builder, self._id_source, self._guard = builder, id_source, guard
        self._listener, self._run_file = listener, run_file
        self._exports = [guard.guarded(exporter.export) for exporter in exporters]
        self._later_ns = [exporter.later_ns for exporter in exporters]
        self._add_metrics = guard.guarded(metrics.add)  # a record that cannot be counted is still exported
        self._add_log_metrics = guard.guarded(metrics.log)
        self._diagnose = guard.guarded(BlindSpotDiagnostics(warn, builder.templates.includes).check)
        self._set_collectives = guard.guarded(metrics.set_collectives)
        self._step_processed = guard.guarded(listener.step_processed)
        self._kinds_seen: set[str] = set()
        self._fold, self._trees, self._tail_sampler = EvaluationFold(), CallTreeBuilder(yielder), TailSampler()
        self.spans_recorded = 0
        """Spans that were passed to the exporters or sampled out."""
        self.spans_sampled_out = 0
        self.spans_dropped = 0
        """Spans of records that were dropped before an exporter got them; `spans_recorded` does not include them."""
        self.spans_estimated = 0
        """The sum of the estimates of all records so far, which the training process compares with what it has sent."""

    def record_to(self, run_file: RunFile) -> None:
        """Export to a run file, too, which was opened with the first record."""
        self._exports.append(self._guard.guarded(run_file.export))
        self._run_file = run_file

    def process(self, record: Record) -> None:
        """Add a record to the metrics and the run file, and export its trace."""
        if record.kind != "stall":  # the companion makes it
            self.spans_estimated += record.span_estimate()
        self._announce(record)
        if isinstance(record, Log):
            self._add_log_metrics(record)
            if self._run_file is not None:
                self._run_file.step(log_line(record))
            return
        for ready in self._fold.add(record):
            start_ns = time.thread_time_ns()
            spans = self._process_step(ready)
            if ready.kind == "step":
                later_ns = sum(later_ns(spans) for later_ns in self._later_ns)
                self._step_processed(ready, time.thread_time_ns() - start_ns + later_ns)

    def add_reading(self, reading: CollectiveReading) -> None:
        """Add a reading of the flight recorder to the metrics and the run file."""
        self._set_collectives(reading.groups)
        if self._run_file is not None:
            self._run_file.step(encode_reading(reading))

    def export_folded(self) -> None:
        """Export all folded evaluations."""
        self._process_folded(self._fold.pop_all())

    def export_quiet(self) -> None:
        """Export the folded evaluations of user spans that have had no evaluation for a while."""
        self._process_folded(self._fold.pop_quiet(time.perf_counter_ns()))

    def drop(self, spans: int) -> None:
        """Count the spans of a record that was dropped; without an exporter there are none."""
        self.spans_estimated += spans
        if self._exports:
            self.spans_dropped += spans

    def _announce(self, record: Record) -> None:
        kind = "log" if isinstance(record, Log) else record.kind
        if kind not in self._kinds_seen:
            self._kinds_seen.add(kind)
            run = self._listener.before_first(record)
            if run is not None:
                self._export(run)

    def _process_folded(self, records: Iterable[StepRecord]) -> None:
        for record in records:
            try:
                self._process_step(record)
            except Exception:  # noqa: BLE001  # the next record may be good
                self._guard.fault()
                self.drop(record.span_estimate())

    def _process_step(self, record: StepRecord) -> int:
        """Process a step or an evaluation, and return the number of exported spans."""
        tree = self._trees.build(record)
        self._diagnose(record, tree)
        nonfinite = find_nonfinite(record, tree)
        late_reason, parent = self._tail_sampler.reason(record, nonfinite), root_parent(record)
        attributes = root_attributes(record, late_reason or record.reason, nonfinite)
        shared = self._builder.shared
        root = record.identity or self._id_source.start(
            shared.root_name(record),
            parent,
            record.start_ns + record.unix_offset_ns,
            {**trace_attributes(record), **attributes},
            record.baggage,
            shared.trace_id(record.alignment),
        )
        if self._run_file is not None:
            self._run_file.step(record_line(record, root.trace_id, nonfinite))
        # The tail sampler keeps no evaluation below a user's span that was not sampled: its parent is not exported.
        kept = root.sampled or (late_reason is not None and self._id_source.keeps_late and parent is None)
        self._add_metrics(record, tree, root if kept and self._exports else None)
        if kept:
            trace = self._builder.build(record, tree, root, attributes)
            self._export(trace)
            return len(trace.spans)
        self._id_source.end_unsampled(root, record.end_ns + record.unix_offset_ns)
        if self._exports:
            self.spans_recorded += record.span_estimate()
            self.spans_sampled_out += record.span_estimate()
        return 0

    def _export(self, trace: Trace) -> None:
        if self._exports:
            self.spans_recorded += len(trace.spans)
        for export in self._exports:  # an exporter counts the spans that it drops
            export(trace)
