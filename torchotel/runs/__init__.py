"""Read back a recorded run; needs neither torch nor OpenTelemetry."""

from torchotel.runs.reader import RecordLine, RequestLine, Run, RunError, SpanLine, open_run
from torchotel.runs.summary import Failure, LayerTime, PhaseTime, Summary, ending, summarise
from torchotel.runs.summary_table import describe, render
from torchotel.runs.value_ranges import At, Onset, Track, Tracked

__all__ = [
    "At",
    "Failure",
    "LayerTime",
    "Onset",
    "PhaseTime",
    "RecordLine",
    "RequestLine",
    "Run",
    "RunError",
    "SpanLine",
    "Summary",
    "Track",
    "Tracked",
    "describe",
    "ending",
    "open_run",
    "render",
    "summarise",
]
