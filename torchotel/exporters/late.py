"""An exporter that is made on the worker, since what it is made of takes milliseconds to load."""

from collections.abc import Callable

from torchotel.exporters.stats import ExportStats
from torchotel.tracing.span import Trace, TraceExporter


class LateExporter(TraceExporter):
    """Make an exporter when it is prepared, and be it from then on.

    Args:
        make: Called once; what it raises is for the caller of `prepare`.
        stats: Where spans and failures are counted while there is none.
    """

    def __init__(self, make: Callable[[], TraceExporter], stats: ExportStats) -> None:
        self._make, self._stats = make, stats
        self._made: TraceExporter | None = None
        self._lost = False
        """Spans were lost since the last flush."""

    def prepare(self) -> None:
        """Make it, and have it load what it needs."""
        if self._made is None:
            self._made = self._make()
        self._made.prepare()

    def export(self, trace: Trace) -> None:
        """Take one trace; without an exporter it is lost."""
        if self._made is None:
            self._stats.dropped(len(trace.spans))
            self._lost = True
        else:
            self._made.export(trace)

    def push(self) -> None:
        """Send what was taken on its way, without waiting."""
        if self._made is not None:
            self._made.push()

    def flush(self, deadline_s: float) -> bool:
        """Bring out what was taken; False where it could not be by `deadline_s`, or was lost."""
        lost, self._lost = self._lost, False
        return not lost if self._made is None else self._made.flush(deadline_s)

    def shutdown(self, deadline_s: float) -> None:
        """Flush and let go of threads, sockets and files, where there are any."""
        if self._made is not None:
            self._made.shutdown(deadline_s)
