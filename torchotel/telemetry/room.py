"""Room for spans in traces that several evaluations share: those of one request."""

from __future__ import annotations

MOST_TRACES = 1024
"""Traces that are remembered; one that was forgotten has all its room again."""


class Room:
    """Add up what evaluations have put into each trace.

    Args:
        max_spans: Most spans of a trace; None: no limit.
    """

    def __init__(self, max_spans: int | None) -> None:
        self._max_spans = max_spans
        self._taken: dict[int, int] = {}
        """By trace id; the last that was taken from comes last."""

    def left(self, trace_id: int) -> int | None:
        """Return how many spans more a trace may have; None: any number."""
        return None if self._max_spans is None else max(0, self._max_spans - self._taken.get(trace_id, 0))

    def take(self, trace_id: int, spans: int) -> None:
        """Take note of spans of a trace."""
        self._taken[trace_id] = self._taken.pop(trace_id, 0) + spans
        if len(self._taken) > MOST_TRACES:
            del self._taken[next(iter(self._taken))]
