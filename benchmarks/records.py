"""Recorded input of the worker: the records of some steps, and their traces."""

from __future__ import annotations

from typing import cast

from benchmarks.workloads import Workload
from torchotel._records import Recordable, StepRecord
from torchotel._utils.gil import GilYielder
from torchotel.capture.recorder import Capture
from torchotel.sampling.detail import Detail
from torchotel.tracing.call_tree import CallTreeBuilder
from torchotel.tracing.ids import IdGenerator
from torchotel.tracing.span import Trace
from torchotel.tracing.span_templates import Templates
from torchotel.tracing.trace_builder import TraceBuilder


def record(workload: Workload, steps: int) -> list[StepRecord]:
    """Train in detail and return the records, without the first two steps, which name the modules."""
    handed: list[Recordable] = []
    capture = Capture(handed.append, Detail("all"))
    capture.install()
    for _ in range(2 + steps):
        workload.step()
    capture.uninstall()
    capture.end()
    return [cast("StepRecord", one.record()) for one in handed[2:]]  # no values are logged


class Builder:
    """Builds traces from records, as the worker does."""

    def __init__(self) -> None:
        sliced = GilYielder(lambda: None)
        self._traces, self._timer = TraceBuilder(Templates(), 2000, sliced), CallTreeBuilder(sliced)
        self._identities = IdGenerator("always_on")

    def build(self, unit: StepRecord) -> Trace:
        """Build the trace of a step."""
        root = self._identities.start("torch.step", None, unit.start_ns)
        return self._traces.build(unit, self._timer.build(unit), root, {})
