"""Read and summarise recorded runs, without torch and OpenTelemetry."""

from torchotel.runs.reader import RecordLine, RequestLine, Run, RunError, SpanLine, open_run
from torchotel.runs.summary import Failure, LayerTime, PhaseTime, Summary, run_failure, summarise
from torchotel.runs.tables import describe, render
from torchotel.runs.value_ranges import Onset, StepValue, ValueRange, ValueRanges

__all__ = [
    "Failure",
    "LayerTime",
    "Onset",
    "PhaseTime",
    "RecordLine",
    "RequestLine",
    "Run",
    "RunError",
    "SpanLine",
    "StepValue",
    "Summary",
    "ValueRange",
    "ValueRanges",
    "describe",
    "open_run",
    "render",
    "run_failure",
    "summarise",
]
