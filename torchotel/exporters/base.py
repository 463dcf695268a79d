"""Base classes of exporters, their counts, and a cache of encoded templates."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torchotel._records import Record
from torchotel.tracing.span import SpanTemplate, Trace


class TraceExporter:
    """Export finished traces. Unless a subclass overrides it, a method does nothing.

    `flush` and `shutdown` are called on threads of the program, every other method on the worker thread. Deadlines are
    those of `time.monotonic()`.
    """

    def export(self, trace: Trace) -> None:
        """Export a trace, or keep it until the next `push` or `shutdown`."""

    def push(self) -> None:
        """Start to send the traces that are kept, without waiting."""

    def push_due(self) -> None:
        """Push if it is time; called twice a second."""
        self.push()

    def flush(self, deadline_s: float) -> bool:
        """Wait until all traces from before the last `push` are exported.

        Return False on timeout or if spans were dropped since the last flush.
        """
        return True

    def shutdown(self, deadline_s: float) -> None:
        """Export all traces by the deadline and release threads, sockets and files."""

    def later_ns(self, spans: int) -> int:
        """Return the CPU time that a trace costs after `export`, as far as it counts as overhead."""
        return 0


class MetricExporter:
    """Export metrics, from the constructor to `shutdown`. Unless a subclass overrides it, a method does nothing."""

    def first_record(self) -> None:
        """Start if this was deferred until the first step or evaluation; called on the worker thread."""

    def flush(self, deadline_s: float) -> bool:
        """Export the present state by `deadline_s` of `time.monotonic()`; return False on timeout."""
        return True

    def shutdown(self, deadline_s: float) -> None:
        """Export the last state by the deadline and release threads, ports and files."""

    def disable_after_fork(self) -> None:
        """Stop exporting in a forked child, without changing what belongs to the parent process."""


@dataclass(frozen=True, slots=True)
class ExportCounts:
    """Counts of spans and errors at one moment."""

    exported: int
    """Spans that the destination accepted."""
    dropped: int
    """Spans that were dropped."""
    errors: dict[str, int]
    """Failed attempts by `error.type`: an HTTP status, a class of an exception, or a word such as `queue_full`."""
    sampled_out: int = 0
    """Spans that the sampler of the program's provider did not sample, below a sampled root."""
    dropped_queue: int = 0
    """Dropped spans of a full queue."""


class ExportStats:
    """Count every span once, as exported, dropped or sampled out; from any thread.

    Args:
        on_exported: Called with the ids of traces whose roots were exported, on the exporting thread.
    """

    def __init__(self, on_exported: Callable[[Iterable[int]], None] | None = None) -> None:
        self._on_exported = on_exported
        self._lock = threading.RLock()  # reentrant: a signal handler may flush while this thread holds it
        self._exported = 0
        self._dropped = 0
        self._dropped_queue = 0
        self._sampled_out = 0
        self._errors: Counter[str] = Counter()
        self.last_error: str | None = None
        """The type of the last failed attempt; None: none has failed."""

    def exported(self, spans: int, traces: Iterable[int] = ()) -> None:
        """Count exported spans; `traces` are the traces whose roots are among them."""
        with self._lock:
            self._exported += spans
        if self._on_exported is not None:
            self._on_exported(traces)

    def dropped(self, spans: int, *, queue: bool = False) -> None:
        """Count dropped spans; `queue`: because a queue was full."""
        with self._lock:
            self._dropped += spans
            self._dropped_queue += spans if queue else 0

    def sampled_out(self, spans: int) -> None:
        """Count spans that a sampler did not sample."""
        with self._lock:
            self._sampled_out += spans

    def error(self, kind: str) -> None:
        """Count a failed attempt."""
        with self._lock:
            self._errors[kind] += 1
            self.last_error = kind

    def read(self) -> ExportCounts:
        """Return all counts at one moment."""
        with self._lock:
            return ExportCounts(
                self._exported, self._dropped, dict(self._errors), self._sampled_out, self._dropped_queue
            )


class DroppingExporter(TraceExporter):
    """Count all spans as dropped, in place of an exporter that could not be created.

    Args:
        stats: Counts spans.
    """

    def __init__(self, stats: ExportStats) -> None:
        self._stats = stats
        self._has_dropped = False
        """Whether spans were dropped since the last flush."""

    def export(self, trace: Trace) -> None:
        """Drop one trace."""
        self._stats.dropped(len(trace.spans))
        self._has_dropped = True

    def flush(self, deadline_s: float) -> bool:
        """Return False if spans were dropped since the last flush."""
        dropped, self._has_dropped = self._has_dropped, False
        return not dropped


MAX_TEMPLATES = 20_000
"""Cached templates; a model with ever new shapes has any number of them."""

Encoding = TypeVar("Encoding")


class TemplateCache(dict[SpanTemplate, Encoding]):
    """Map a template to its encoding; a new template is encoded on access.

    The key is the template, not its `id()`, which could be reused if the template were not kept alive.
    """

    def __init__(self, encode: Callable[[SpanTemplate], Encoding], limit: int = MAX_TEMPLATES) -> None:
        super().__init__()
        self._encode = encode
        self._limit = limit

    def __missing__(self, template: SpanTemplate) -> Encoding:
        if len(self) >= self._limit:
            # The templates in use are added again by the next step, so no order of use is kept.
            self.clear()
        encoding = self[template] = self._encode(template)
        return encoding


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
