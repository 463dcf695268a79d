"""Read back a recorded run; needs neither torch nor OpenTelemetry."""

from torchotel.report.info import RunError
from torchotel.report.read import RequestLine, Run, SpanLine, UnitLine, open_run
from torchotel.report.summary import Failure, LayerTime, PhaseTime, Summary, ending, summarise
from torchotel.report.tables import describe, render
from torchotel.report.tracked import At, Onset, Track, Tracked

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
