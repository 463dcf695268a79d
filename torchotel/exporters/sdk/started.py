"""Spans of a provider that were started before their trace was there."""

import contextlib
import threading

from opentelemetry.context import Context
from opentelemetry.trace import Span

from torchotel import _names

MOST_STARTED = 4096
"""Spans of open steps whose context was asked for; what is older belongs to records that were dropped."""
MOST_WAITING = 50_000
"""While the worker is behind, those of records that it has not come to are there as well."""


class StartedSpans:
    """Keep live spans until their trace is replayed; bounded, since a record may be dropped before."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal's handler may ask in the midst of it
        self._spans: dict[int, tuple[Span, Context]] = {}

    def add(self, span: Span, context: Context) -> None:
        """Keep a span, by its id, and the context that it began in."""
        with self._lock:
            self._spans[span.get_span_context().span_id] = span, context
        if len(self._spans) > MOST_WAITING:
            self.end_oldest(MOST_WAITING)

    def get(self, span_id: int) -> tuple[Span, Context] | None:
        """Return a span that is kept, and keep it."""
        return self._spans.get(span_id)

    def take(self, span_id: int) -> tuple[Span, Context] | None:
        """Return a span that is kept, for its end."""
        if span_id not in self._spans:  # nearly always
            return None
        with self._lock:
            return self._spans.pop(span_id, None)

    def end_oldest(self, keep: int = MOST_STARTED) -> None:
        """End all but the newest as they are; they say that nobody saw their end."""
        with self._lock:
            ids = list(self._spans)
            oldest = [self._spans.pop(span_id) for span_id in ids[: max(0, len(ids) - keep)]]
        for span, _ in oldest:  # not under the lock: processors of the user's run here, and may raise
            with contextlib.suppress(Exception):
                span.set_attribute(_names.ESTIMATED, "end")
                span.end()
