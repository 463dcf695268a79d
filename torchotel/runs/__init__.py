"""Read back a recorded run; needs neither torch nor OpenTelemetry."""

from torchotel.runs.reader import RequestLine, Run, RunError, SpanLine, UnitLine, open_run
from torchotel.runs.summary import Failure, LayerTime, PhaseTime, Summary, ending, summarise
from torchotel.runs.summary_table import describe, render
from torchotel.runs.value_ranges import At, Onset, Track, Tracked

__all__ = [
    "At",
    "Failure",
    "LayerTime",
    "Onset",
    "PhaseTime",
    "RequestLine",
    "Run",
    "RunError",
    "SpanLine",
    "Summary",
    "Track",
    "Tracked",
    "UnitLine",
    "describe",
    "ending",
    "open_run",
    "render",
    "summarise",
]
