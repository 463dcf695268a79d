"""Read back a recorded run; needs neither torch nor OpenTelemetry."""

from torchotel.report.info import RunError
from torchotel.report.read import RequestLine, Run, SpanLine, UnitLine, open_run
from torchotel.report.summary import LayerTime, PhaseTime, Summary, summarise
from torchotel.report.tables import render
from torchotel.report.tracked import Track, Tracked

__all__ = [
    "LayerTime",
    "PhaseTime",
    "RequestLine",
    "Run",
    "RunError",
    "SpanLine",
    "Summary",
    "Track",
    "Tracked",
    "UnitLine",
    "open_run",
    "render",
    "summarise",
]
