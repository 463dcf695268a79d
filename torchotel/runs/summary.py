"""Compute the summary of a run from its step records and spans; pure functions."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchotel import _semconv as names
from torchotel._records import PHASES, PROCESS_ENDS, STALLED
from torchotel.runs.reader import Call, LayerKey, RecordLine, SpanLine, calls_by_trace
from torchotel.runs.value_ranges import ValueRangeCollector, ValueRanges


class PhaseTime(NamedTuple):
    """One phase over all steps, or the whole step."""

    name: str
    mean_s: float
    p50_s: float
    p95_s: float
    share: float
    """Share of the time of all steps."""


class LayerTime(NamedTuple):
    """One module in one direction over all its calls."""

    model: str
    path: str
    type: str
    calls: int
    self_s: float
    """Seconds, without the module calls inside this module's calls."""
    total_s: float
    mean_s: float
    share: float
    """Share of the self time of all layers in this direction; the shares add up to 1."""
    longest_s: float = 0.0
    """Seconds of the longest call."""
    inner_calls: int = 0
    """Module calls directly inside calls of this module."""
    is_root: bool = False
    """Whether the layer is the model itself."""

    def name(self, *, several: bool) -> str:
        """Return the path, with the model's name before it if the run has several; a root is named as its model."""
        if self.is_root:
            return self.model
        return f"{self.model}: {self.path}" if several else self.path


class ModuleStep(NamedTuple):
    """Times of one training step whose module calls were recorded."""

    number: int
    forward_s: float
    """Seconds of the forward phase."""
    backward_s: float
    """Seconds of the backward phase."""
    root_calls_s: float
    """Seconds of the forward calls that no other module call contains."""
    root_calls: int
    """Number of the forward calls that no other module call contains."""


_IN_PHASE = {
    "data": ", while fetching a batch",
    "backward": ", in the backward",
    "optimizer": ", in the optimizer's step",
}


class Failure(NamedTuple):
    """A step or an evaluation that ended with an exception, or the exception that ended the program."""

    type: str
    message: str
    path: str
    """Path of the module that raised; empty: unknown, or the exception was raised outside module calls."""
    kind: str
    """step | evaluation | data (fetching a batch); empty: raised by the program's own code, outside all of these."""
    number: int
    last_step: int | None
    """The last completed step before the failure."""
    phase: str = ""
    """Phase that raised the error; empty: unknown."""

    @property
    def place(self) -> str:
        """Return where the failure happened, as a phrase with its preposition: "at step 3, in the backward"."""
        before = "before the first step" if self.last_step is None else f"after step {self.last_step:,}"
        if self.kind == "step":
            # An exception of the program's loss is in the forward phase too, which reaches to the backward.
            in_forward = self.phase == "forward" and self.type in {STALLED, *PROCESS_ENDS}
            return f"at step {self.number:,}" + (", in the forward" if in_forward else _IN_PHASE.get(self.phase, ""))
        if self.kind == "data":
            return f"while fetching a batch, {before}"
        return f"at evaluation {self.number:,}, {before}" if self.kind else before


def has_several_models(layers: Iterable[LayerTime]) -> bool:
    """Return whether layers need their model's name. A loss counts as a model, but has no layers."""
    return len({layer.model for layer in layers if not layer.is_root}) > 1


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Counts, times, failures and value ranges of a run."""

    steps: int
    evaluations: int
    detailed_steps: int
    errors: Mapping[str, int]
    """Failed steps and evaluations by type of the exception."""
    first_failure: Failure | None
    last_failure: Failure | None
    """The failure after which no further record was written; None if the run continued."""
    last_step: int | None
    """The last completed step."""
    phases: Sequence[PhaseTime]
    """The whole step first, then its phases; empty if the run has no step."""
    forward: Sequence[LayerTime]
    """Layers of training steps, or of evaluations if the run has no step. Sorted by self time, largest first: by total
    time the root would always be first."""
    backward: Sequence[LayerTime]
    value_ranges: ValueRanges
    """Ranges of logged values and of gradient norms."""
    steps_per_second: float | None = None
    """By wall-clock time from the first step's start to the last step's end, like all rates; None: no step."""
    last_stall: Failure | None = None
    """The last time that the training stalled, which is no failure."""
    unfinished_step: Failure | None = None
    """The last step, if it had no optimizer step although earlier steps had, and no record followed."""
    module_steps: Sequence[ModuleStep] = ()
    """The training steps whose layers `forward` and `backward` contain."""
    samples_per_second: float | None = None
    """None: no samples were logged."""
    tokens_per_second: float | None = None
    """None: no tokens were logged."""
    evaluation_s: float = 0.0
    """Seconds of all evaluations."""
    folded_calls: int = 0
    """Module calls beyond `max_spans`, which have no span; their time is part of their callers' self time."""


def summarise(units: Iterable[RecordLine], spans: Iterable[SpanLine]) -> Summary:
    """Add up the lines of a run; the spans of one trace are kept at a time."""
    counts: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    failures = _Failures()
    steps, evaluation_s = [], 0.0
    tracks = ValueRangeCollector()
    for record in units:
        failures.add(record)
        if record.kind == "stall":
            continue
        counts[_kind(record)] += max(1, record.folded)
        tracks.add(record)
        if record.error_type:
            errors[record.error_type] += 1
        if _kind(record) == "evaluation":
            evaluation_s += record.folded_s or record.duration_s
        if record.kind == "step":
            # The collector has read these values; norms of many layers would take most of the memory.
            steps.append(record._replace(values={}, gradient_norms={}, nonfinite=()))
    value_ranges, wall_s = tracks.result(), _wall_s(steps)
    in_steps, in_evaluations = _read_layers(spans)
    layers = in_steps if counts["step"] else in_evaluations
    return Summary(
        steps=counts["step"],
        evaluations=counts["evaluation"],
        detailed_steps=sum(step.detailed for step in steps),
        errors=dict(errors.most_common()),
        first_failure=failures.first,
        last_failure=failures.last,
        last_stall=failures.last_stall,
        last_step=failures.last_step,
        unfinished_step=failures.unfinished_step,
        phases=_phases(steps),
        forward=layers.slowest("forward"),
        backward=layers.slowest("backward"),
        value_ranges=value_ranges,
        module_steps=_module_steps(steps, in_steps),
        steps_per_second=len(steps) / wall_s if wall_s else None,
        samples_per_second=_rate(value_ranges.totals.get("samples"), wall_s),
        tokens_per_second=_rate(value_ranges.totals.get("tokens"), wall_s),
        evaluation_s=evaluation_s,
        folded_calls=layers.folded_calls,
    )


def _read_layers(spans: Iterable[SpanLine]) -> tuple["_Layers", "_Layers"]:
    """Return the layers of training steps, and the layers of evaluations."""
    in_steps, in_evaluations = _Layers(), _Layers()

    def layers_of(span: SpanLine) -> _Layers:
        return in_steps if names.STEP_NUMBER in span.attributes else in_evaluations

    def counted() -> Iterator[SpanLine]:
        for span in spans:
            folded = span.attributes.get(names.FOLDED_CALLS)
            layers_of(span).folded_calls += folded if isinstance(folded, int) else 0
            yield span

    for _, calls in calls_by_trace(counted()):
        for call in calls:
            layers_of(call.span).add(call)
    return in_steps, in_evaluations


def _module_steps(steps: Sequence[RecordLine], layers: "_Layers") -> Sequence[ModuleStep]:
    return [
        ModuleStep(
            step.number,
            step.phases.get("forward", 0.0),
            step.phases.get("backward", 0.0),
            layers.root_calls_ns[step.trace_id] / 1e9,
            layers.root_calls[step.trace_id],
        )
        for step in steps
        if step.trace_id in layers.root_calls
    ]


def _wall_s(steps: Sequence[RecordLine]) -> float:
    """Return seconds of wall-clock time from the first step's start to the last step's end."""
    if not steps:
        return 0.0
    began_ns = min(step.start_unix_ns for step in steps)
    return max((step.start_unix_ns - began_ns) / 1e9 + step.duration_s for step in steps)


def _rate(total: float | None, wall_s: float) -> float | None:
    return total / wall_s if total is not None and wall_s else None


def run_failure(summary: Summary, info: Mapping[str, Any]) -> Failure | None:
    """Return the failure that ended the run: the program's last exception, at the last failed step if none followed.

    A run without an end in its description goes on, or was killed: its last exception ended a step, but not the run.
    """
    failure, error = summary.last_failure, info.get("error") or {}
    if "type" not in error:
        killed = failure is not None and failure.type in PROCESS_ENDS and not info.get("finished")
        return failure if killed else None
    failure = failure or summary.unfinished_step or Failure("", "", "", "", 0, summary.last_step)
    return failure._replace(type=error["type"], message=error.get("message", ""))


def _kind(record: RecordLine) -> str:
    """Return the kind that a line counts as; a failed forward in training mode counts as part of a training step."""
    trains = record.kind == "evaluation" and record.grad and record.training
    return "forward" if trains and record.error_type else record.kind


@dataclass(slots=True)
class _Failures:
    """Find the first and the last failure. A step may be written after evaluations that followed it."""

    first: Failure | None = None
    last: Failure | None = None
    last_stall: Failure | None = None
    last_step: int | None = None
    _next: int = 0
    _first_ns: int = 0
    _latest_ns: int = 0
    _has_optimizer: bool = False
    _unfinished: Failure | None = None
    _unfinished_ns: int = 0

    @property
    def unfinished_step(self) -> Failure | None:
        return self._unfinished if self._unfinished_ns == self._latest_ns else None

    def add(self, record: RecordLine) -> None:
        if record.kind == "log":
            return
        if record.kind == "stall":
            self.last_stall = self._failure(record)._replace(kind="step" if record.grad else "evaluation")
            return
        failure = self._failure(record) if record.error_type else None
        end_ns = record.start_unix_ns + int(record.duration_s * 1e9)
        if end_ns >= self._latest_ns:
            self._latest_ns, self.last = end_ns, failure
        if failure is not None and self.first is None:
            self.first, self._first_ns = failure, end_ns
        if record.kind == "step":
            self._next = record.number + 1
        if failure is None and record.kind == "step":
            stepped = record.phases.get("optimizer", 0.0) > 0
            self._unfinished_ns, self._unfinished = end_ns, None
            if self._has_optimizer and not stepped:
                self._unfinished = Failure("", "", "", "step", record.number, self.last_step)
            self._has_optimizer |= stepped
            self.last_step = record.number
            if self.first is not None and end_ns < self._first_ns:
                self.first = self.first._replace(last_step=record.number)
            if self.last is not None:
                self.last = self.last._replace(last_step=record.number)

    def _failure(self, record: RecordLine) -> Failure:
        kind, number = record.kind, record.number
        if _kind(record) == "forward":  # part of the next step, which has no record
            kind, number = "step", self._next
        text, last = record.error_message or "", self.last_step
        return Failure(record.error_type or "", text, record.error_path, kind, number, last, record.error_phase)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the quantile of sorted numbers, interpolated linearly."""
    position = share * (len(ordered) - 1)
    low, high = math.floor(position), math.ceil(position)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _phases(steps: Sequence[RecordLine]) -> Sequence[PhaseTime]:
    if not steps:
        return ()
    whole = sum(step.duration_s for step in steps)
    rows = [("step", sorted(step.duration_s for step in steps))]
    phases_in_run = set().union(*(step.phases for step in steps))  # runs of earlier versions have no "between"
    rows += [(name, sorted(step.phases.get(name, 0.0) for step in steps)) for name in PHASES if name in phases_in_run]
    return [
        PhaseTime(
            name=name,
            mean_s=sum(seconds) / len(seconds),
            p50_s=quantile(seconds, 0.5),
            p95_s=quantile(seconds, 0.95),
            share=sum(seconds) / whole if whole else 0.0,
        )
        for name, seconds in rows
    ]


@dataclass(slots=True)
class _Tally:
    type: str = ""
    calls: int = 0
    total_ns: int = 0
    inner_ns: int = 0
    longest_ns: int = 0
    inner_calls: int = 0


class _Layers:
    """Aggregate the times of module calls by layer. `calls_by_trace` keeps the spans of one trace at a time."""

    def __init__(self) -> None:
        self.folded_calls = 0
        self.root_calls_ns: Counter[str] = Counter()
        """Time of the forward calls that are in no other module call, by trace id."""
        self.root_calls: Counter[str] = Counter()
        self._tallies: defaultdict[LayerKey, _Tally] = defaultdict(_Tally)
        self._inner: set[tuple[str, str]] = set()
        """Models and paths of modules that another module of the same model called."""

    def add(self, call: Call) -> None:
        span, layer, outer = call
        tally = self._tallies[layer]
        tally.type = tally.type or str(span.attributes.get(names.MODULE_TYPE, ""))
        tally.calls += 1
        tally.total_ns += span.duration_ns
        tally.longest_ns = max(tally.longest_ns, span.duration_ns)
        if outer is not None:
            self._tallies[outer].inner_ns += span.duration_ns
            self._tallies[outer].inner_calls += 1
            # The calls of a wrapper (DistributedDataParallel) and of the module in it have the same path.
            if outer.model == layer.model and outer.path != layer.path:
                self._inner.add((layer.model, layer.path))
        elif layer.direction == "forward":
            self.root_calls_ns[span.trace_id] += span.duration_ns
            self.root_calls[span.trace_id] += 1

    def _is_root(self, layer: LayerKey, kind: str) -> bool:
        """Tell a model from its layers: its path is its class, which a layer's path can be as well."""
        model, path, _ = layer
        is_class = path in {kind, model} or model.startswith(f"{path}-")
        return is_class and (model, path) not in self._inner

    def slowest(self, direction: str) -> Sequence[LayerTime]:
        # A layer has no calls if a damaged file has it only as the parent of a call that is counted here.
        tallies = [(key, tally) for key, tally in self._tallies.items() if key.direction == direction and tally.calls]
        whole = sum(max(0, tally.total_ns - tally.inner_ns) for _, tally in tallies)
        rows = []
        for key, tally in tallies:
            # A child can end after its parent if its end is an upper bound.
            self_ns = max(0, tally.total_ns - tally.inner_ns)
            rows.append(
                LayerTime(
                    model=key.model,
                    path=key.path,
                    type=tally.type,
                    calls=tally.calls,
                    self_s=self_ns / 1e9,
                    total_s=tally.total_ns / 1e9,
                    mean_s=tally.total_ns / 1e9 / tally.calls,
                    share=self_ns / whole if whole else 0.0,
                    longest_s=tally.longest_ns / 1e9,
                    inner_calls=tally.inner_calls,
                    is_root=self._is_root(key, tally.type),
                )
            )
        return sorted(rows, key=lambda row: (-row.self_s, row.path))
