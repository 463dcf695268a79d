"""What `stats()` returns: counts of spans, steps and errors, and the state of the worker."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypedDict, cast


class Stats(TypedDict):
    """Counts of spans, steps, evaluations and errors since `instrument()`."""

    spans_recorded: int
    spans_exported: int
    spans_dropped: int
    spans_sampled_out: int
    export_errors: int
    """Failed attempts to export; each retry counts."""
    steps: int
    evaluations: int
    steps_detailed: int
    calls_dropped: int
    stamps_dropped: int
    """Timestamps of backwards beyond the limit of one step, for example if one graph runs backward very many times."""
    internal_errors: int
    """Errors in torchotel, which never reach the program."""
    overhead_ratio: float | None
    """Share of step time that detail costs; None until steps with and without detail were compared."""


class WorkerState(TypedDict):
    """The worker that builds and exports spans."""

    kind: Literal["thread", "process"]
    pid: int
    memory_bytes: int | None
    """Resident memory of the companion process; None for a thread, which has no memory of its own."""
    lag_s: float | None
    """Time from the end of the last processed step or evaluation until it was processed; None: there was none."""
    last_error: str | None
    """Type of the last failed attempt to export; None: none has failed."""


class HandleStats(Stats):
    """What `Handle.stats` returns: the counts, and the worker."""

    worker: WorkerState | None
    """None if nothing is exported: torchotel is disabled or shut down, or the companion process has ended.

    Also before the first record of a process that may be a launcher, whose companion starts with that record.
    """


def no_stats() -> Stats:
    """Return the counts of a handle without a session."""
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


def add_stats(first: Stats, second: Stats) -> Stats:
    """Return the sums of the counts; the share of time is that of the second."""
    ratio: dict[str, object] = {"overhead_ratio": second["overhead_ratio"]}
    mine, others = cast("dict[str, int]", first), cast("dict[str, int]", second)
    return cast("Stats", {**{name: mine[name] + others[name] for name in first if name not in ratio}, **ratio})


class CaptureStats(NamedTuple):
    """The counts of `Stats` that capture knows."""

    calls_dropped: int
    stamps_dropped: int
    internal_errors: int
