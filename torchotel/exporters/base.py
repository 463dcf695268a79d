"""What exporters share: the interfaces, their counts and templates."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from torchotel.tracing.span import SpanTemplate, Trace


class TraceExporter:
    """Export finished traces. Unless a subclass overrides it, a method does nothing.

    Every method is called on the worker thread, except for `shutdown`. Deadlines are those of `time.monotonic()`.
    """

    def export(self, trace: Trace) -> None:
        """Export a trace, or keep it until the next `push`, `flush` or `shutdown`."""

    def push(self) -> None:
        """Start to send the traces that are kept, without waiting."""

    def flush(self, deadline_s: float) -> bool:
        """Export all traces by the deadline. Return False on timeout or if spans were dropped since the last flush."""
        return True

    def shutdown(self, deadline_s: float) -> None:
        """Export all traces by the deadline and release threads, sockets and files."""


class MetricExporter:
    """Export metrics, from the constructor to `shutdown`. Unless a subclass overrides it, a method does nothing."""

    def first_step(self) -> None:
        """Start what waits for this process to train; called on the worker thread."""

    def flush(self, deadline_s: float) -> bool:
        """Export the present state by `deadline_s` of `time.monotonic()`; return False on timeout."""
        return True

    def shutdown(self, deadline_s: float) -> None:
        """Export the last state by the deadline and release threads, ports and files."""

    def disable_after_fork(self) -> None:
        """Stop exporting in a forked child, without changing what belongs to the parent process."""


@dataclass(frozen=True, slots=True)
class ExportCounts:
    """Counts at one moment."""

    exported: int
    """Spans that reached their destination."""
    dropped: int
    """Spans that never will."""
    errors: dict[str, int]
    """Failed attempts by `error.type`: an HTTP status, a class of exception, or a word of ours."""
    sampled_out: int = 0
    """Spans that the sampler of the user's provider left out, below a root that it took."""
    dropped_queue: int = 0
    """Those of the dropped ones that a full queue pushed out."""


class ExportStats:
    """Count every span that an exporter takes exactly once: exported, dropped or sampled out; from any thread.

    Args:
        on_exported: Gets the ids of traces whose roots arrived, on the thread that brought them out.
    """

    def __init__(self, on_exported: Callable[[Iterable[int]], None] | None = None) -> None:
        self._on_exported = on_exported
        self._lock = threading.RLock()  # a signal's handler may flush or count in the midst of it
        self._exported = 0
        self._dropped = 0
        self._dropped_queue = 0
        self._sampled_out = 0
        self._errors: Counter[str] = Counter()

    def exported(self, spans: int, traces: Iterable[int] = ()) -> None:
        """Add spans that arrived, and say whose roots were among them."""
        with self._lock:
            self._exported += spans
        if self._on_exported is not None:
            self._on_exported(traces)

    def dropped(self, spans: int, *, queue: bool = False) -> None:
        """Add spans that are lost; `queue`: because too much was waiting."""
        with self._lock:
            self._dropped += spans
            self._dropped_queue += spans if queue else 0

    def sampled_out(self, spans: int) -> None:
        """Add spans that a sampler left out."""
        with self._lock:
            self._sampled_out += spans

    def error(self, kind: str) -> None:
        """Add a failure; one that is retried counts at each attempt."""
        with self._lock:
            self._errors[kind] += 1

    def read(self) -> ExportCounts:
        """Read all counts of the same moment."""
        with self._lock:
            return ExportCounts(
                self._exported, self._dropped, dict(self._errors), self._sampled_out, self._dropped_queue
            )


class DroppingExporter(TraceExporter):
    """Stand for an exporter that could not be created: count its spans as dropped.

    Args:
        stats: Where spans are counted.
    """

    def __init__(self, stats: ExportStats) -> None:
        self._stats = stats
        self._lost = False
        """Whether spans were dropped since the last flush."""

    def export(self, trace: Trace) -> None:
        """Drop one trace."""
        self._stats.dropped(len(trace.spans))
        self._lost = True

    def flush(self, deadline_s: float) -> bool:
        """Return False if spans were dropped since the last flush."""
        lost, self._lost = self._lost, False
        return not lost


MAX_TEMPLATES = 20_000
"""Templates that are kept; a model with ever new shapes would otherwise keep them all."""

Encoding = TypeVar("Encoding")


class TemplateCache(dict[SpanTemplate, Encoding]):
    """Map a template to its encoding; an unknown one is encoded when it is asked for.

    The template itself is the key: it is compared by identity, and stays alive while it is here, so that
    no other template can take its place in memory.
    """

    def __init__(self, encode: Callable[[SpanTemplate], Encoding], limit: int = MAX_TEMPLATES) -> None:
        super().__init__()
        self._encode = encode
        self._limit = limit

    def __missing__(self, template: SpanTemplate) -> Encoding:
        if len(self) >= self._limit:
            # All at once: what is in use comes back with the next step, and no order of use has to be kept.
            self.clear()
        encoding = self[template] = self._encode(template)
        return encoding
