"""What became of the spans that an exporter took."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass


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
