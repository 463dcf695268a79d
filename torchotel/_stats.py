"""What `handle.stats()` says."""

from typing import TypedDict


class Stats(TypedDict):
    """Counts since `instrument()`."""

    spans_recorded: int
    spans_exported: int
    spans_dropped: int
    spans_sampled_out: int
    export_errors: int
    """Failed attempts; one that is retried counts at each."""
    steps: int
    evaluations: int
    steps_detailed: int
    calls_dropped: int
    stamps_dropped: int
    """Moments of backwards beyond what is kept of one step, as where one graph runs backward very many times."""
    internal_errors: int
    """Errors of our own, which never reach the program."""
    overhead_ratio: float | None
    """Share of step time that detail costs; None until steps with and without were seen."""


def no_stats() -> Stats:
    """Return what is said where nothing runs."""
    return Stats(
        spans_recorded=0,
        spans_exported=0,
        spans_dropped=0,
        spans_sampled_out=0,
        export_errors=0,
        steps=0,
        evaluations=0,
        steps_detailed=0,
        calls_dropped=0,
        stamps_dropped=0,
        internal_errors=0,
        overhead_ratio=None,
    )
