"""An exporter that is made on the worker, since what it is made of takes milliseconds to load."""

from collections.abc import Callable

from torchotel.telemetry.spans import Trace, TraceExporter


class LateExporter(TraceExporter):
    """Make an exporter when it is prepared, and be it from then on.

    Args:
        make: Called once.
    """

    def __init__(self, make: Callable[[], TraceExporter]) -> None:
        self._make = make
        self._made: TraceExporter | None = None

    def prepare(self) -> None:
        """Make it, and have it load what it needs."""
        self._exporter().prepare()

    def export(self, trace: Trace) -> None:
        """Take one trace."""
        self._exporter().export(trace)

    def push(self) -> None:
        """Send what was taken on its way, without waiting."""
        if self._made is not None:
            self._made.push()

    def flush(self, deadline_s: float) -> bool:
        """Bring out what was taken; False where it could not be by `deadline_s`."""
        return self._made is None or self._made.flush(deadline_s)

    def shutdown(self, deadline_s: float) -> None:
        """Flush and let go of threads, sockets and files, where there are any."""
        if self._made is not None:
            self._made.shutdown(deadline_s)

    def _exporter(self) -> TraceExporter:
        if self._made is None:
            self._made = self._make()
        return self._made
