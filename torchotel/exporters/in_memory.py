"""Keep traces in memory."""

from collections.abc import Sequence

from torchotel._records import Record
from torchotel.exporters.base import ExportStats, TraceExporter
from torchotel.tracing.span import Trace


class InMemoryExporter(TraceExporter):
    """Keep all traces, and the records that the caller appends; unbounded."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.traces: list[Trace] = []
        self._stats = ExportStats()

    def exporters(self, stats: ExportStats) -> Sequence[TraceExporter]:
        """Return this exporter as the only one of a session, with the session's statistics."""
        self._stats = stats
        return [self]

    def export(self, trace: Trace) -> None:
        """Keep a trace."""
        self.traces.append(trace)
        self._stats.exported(len(trace.spans), [trace.trace_id])
