"""The times of a run step by step: of the whole step, of its phases, of its layers."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from torchotel import _names as names
from torchotel.report.conditions import Conditions, conditions
from torchotel.report.read import Run, SpanLine
from torchotel.report.summary import PHASES

WARM_UP_STEPS = 10
"""As many as are recorded in detail for being the first."""
WARM_UP_SHARE = 0.2
"""Of a series that is short."""


class LayerKey(NamedTuple):
    """One module in one direction."""

    model: str
    path: str
    direction: str


@dataclass
class StepTimes:
    """Seconds of steps in their order: of the whole step, and of each phase."""

    whole_s: array[float] = field(default_factory=lambda: array("d"))
    phases_s: Mapping[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in PHASES})
    detailed: bytearray = field(default_factory=bytearray)
    """Whether modules were recorded, which takes time."""

    def of_kind(self, *, detailed: bool) -> StepTimes:
        """Choose the steps with detail, or those without."""

        def chosen(series: array[float]) -> array[float]:
            return array("d", (time_s for time_s, kind in zip(series, self.detailed, strict=True) if kind == detailed))

        phases = {name: chosen(series) for name, series in self.phases_s.items()}
        return StepTimes(chosen(self.whole_s), phases)


@dataclass(frozen=True, kw_only=True)
class RunTimes:
    """The times of a run; steps that failed are left out, since they ended early."""

    steps: StepTimes
    layers_s: Mapping[LayerKey, array[float]]
    """Self time of all calls in a step, of the detailed ones."""
    conditions: Conditions = field(default_factory=dict)


def read_times(run: Run) -> RunTimes:
    """Read a run once; what is kept is a number for each phase of a step and each layer of a detailed one."""
    steps, failed = StepTimes(), set()
    for unit in run.units():
        if unit.kind != "step":
            continue
        if unit.error_type:
            failed.add(unit.trace_id)
            continue
        steps.whole_s.append(unit.duration_s)
        steps.detailed.append(unit.detailed)
        for name, series in steps.phases_s.items():
            series.append(unit.phases.get(name, 0.0))
    layers, devices = _layers(run.spans(), failed)
    return RunTimes(steps=steps, layers_s=layers, conditions=conditions(run.info, devices))


def warm(series: Sequence[float]) -> Sequence[float]:
    """Leave out the steps that warm up: the first fifth, ten at most, one at least."""
    return series[min(WARM_UP_STEPS, max(1, int(WARM_UP_SHARE * len(series)))) :]


def _layers(spans: Iterable[SpanLine], failed: set[str]) -> tuple[Mapping[LayerKey, array[float]], set[str]]:
    """Read the layers' times, and the devices that they ran on."""
    layers: dict[LayerKey, array[float]] = defaultdict(lambda: array("d"))
    devices: set[str] = set()
    # A trace is written whole, as one line.
    for trace_id, trace in groupby(spans, key=lambda span: span.trace_id):
        # A module's span without a step's number is part of an evaluation.
        calls = [
            span for span in trace if names.MODULE_TYPE in span.attributes and names.STEP_NUMBER in span.attributes
        ]
        devices |= {device for span in calls if isinstance(device := span.attributes.get(names.DEVICE), str)}
        if trace_id not in failed:
            for key, self_ns in _self_times_ns(calls).items():
                # A child may stick out of its parent where an end is an upper bound.
                layers[key].append(max(0, self_ns) / 1e9)
    return layers, devices


def _self_times_ns(calls: Sequence[SpanLine]) -> Mapping[LayerKey, int]:
    keys = {span.span_id: _key(span) for span in calls}
    times: Counter[LayerKey] = Counter()
    for span in calls:
        duration_ns = max(0, span.end_ns - span.start_ns)
        times[keys[span.span_id]] += duration_ns
        parent = keys.get(span.parent_id)
        if parent is not None:
            times[parent] -= duration_ns
    return times


def _key(span: SpanLine) -> LayerKey:
    read = span.attributes.get
    path = str(read(names.MODULE_PATH, ""))
    return LayerKey(str(read(names.MODEL, "")), path, str(read(names.DIRECTION, "forward")))
