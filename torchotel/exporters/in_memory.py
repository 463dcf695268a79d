"""Traces kept in memory instead of being sent."""

from collections.abc import Sequence

from torchotel._records import Record
from torchotel.exporters.base import ExportStats, TraceExporter
from torchotel.tracing.span import Trace


class InMemoryExporter(TraceExporter):
    """Keep every trace, and every record that is put here before it is built; nothing bounds them."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.traces: list[Trace] = []
        self._stats = ExportStats()

    def exporters(self, stats: ExportStats) -> Sequence[TraceExporter]:
        """Be the one exporter of a session, and count into its statistics."""
        self._stats = stats
        return [self]

    def export(self, trace: Trace) -> None:
        """Keep it."""
        self.traces.append(trace)
        self._stats.exported(len(trace.spans), [trace.trace_id])
