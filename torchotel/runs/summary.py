"""From the lines of a run to the few numbers that people ask for; pure."""

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torchotel import _semconv as names
from torchotel.runs.reader import RecordLine, SpanLine
from torchotel.runs.value_ranges import Tracked, Tracks

PHASES = ("between", "data", "forward", "backward", "optimizer", "other")

_OPEN_TRACES = 64
"""Traces whose spans may still come; a trace is written whole, so few are open at a time."""


class PhaseTime(NamedTuple):
    """One phase over all steps, or the whole step."""

    name: str
    mean_s: float
    p50_s: float
    p95_s: float
    share: float
    """Of the time of all steps."""


class LayerTime(NamedTuple):
    """One module in one direction over all its calls."""

    model: str
    path: str
    type: str
    calls: int
    self_s: float
    """Without the module calls inside it."""
    total_s: float
    mean_s: float
    share: float
    """Of the self time of all layers in this direction, so shares add up to 1."""
    longest_s: float = 0.0
    """Of one call."""
    inner_calls: int = 0
    """Module calls directly inside it."""
    is_root: bool = False
    """Whether it is the model itself."""

    def name(self, *, several: bool) -> str:
        """Return the path, with the model's name before it if the run has several; a root is named as its model."""
        if self.is_root:
            return self.model
        return f"{self.model}: {self.path}" if several else self.path


class ModuleStep(NamedTuple):
    """What a training step took whose module calls were recorded."""

    forward_s: float
    """Of the phase."""
    backward_s: float
    """Of the phase."""
    outermost_s: float
    """Of the forward calls that are in no other module call."""
    outermost_calls: int


_IN_PHASE = {"backward": ", in the backward", "optimizer": ", in the optimizer's step"}


class Failure(NamedTuple):
    """A step or an evaluation that an exception left, or the exception that ended the program."""

    type: str
    message: str
    path: str
    """Path of the module that raised; empty: unknown, or no module's call raised."""
    kind: str
    """step | evaluation | data: fetching a batch; empty: none of them, an exception of the program's own code."""
    number: int
    last_step: int | None
    """The last whole step before it."""
    phase: str = ""
    """Phase that raised the error; empty: unknown."""

    @property
    def place(self) -> str:
        """Name the step and its backward or optimizer's step, the evaluation or the fetch, with its preposition."""
        before = "before the first step" if self.last_step is None else f"after step {self.last_step:,}"
        if self.kind == "step":
            return f"at step {self.number:,}" + _IN_PHASE.get(self.phase, "")
        if self.kind == "data":
            return f"while fetching a batch, {before}"
        return f"at evaluation {self.number:,}, {before}" if self.kind else before


def has_several_models(layers: Iterable[LayerTime]) -> bool:
    """Tell whether paths are ambiguous; a loss is a model too, but has no paths."""
    return len({layer.model for layer in layers if not layer.is_root}) > 1


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a run did, and where its time went."""

    steps: int
    evaluations: int
    detailed_steps: int
    errors: Mapping[str, int]
    """Failed steps and evaluations by type of the exception."""
    first_failure: Failure | None
    last_failure: Failure | None
    """The one after which nothing more was recorded; None if the run went on."""
    last_step: int | None
    """The last whole step."""
    phases: Sequence[PhaseTime]
    """The whole step first; empty where there was no step."""
    forward: Sequence[LayerTime]
    """In training steps, or in evaluations if there was no step. Slowest by self time first: by total time the root
    would always win."""
    backward: Sequence[LayerTime]
    tracked: Tracked
    """What was logged, and the norms of gradients."""
    steps_per_second: float | None = None
    """By the wall clock, from the first step's start to the last step's end, as all rates; None: there was no step."""
    unfinished_step: Failure | None = None
    """The last step, if no optimizer stepped in it, as in others, and nothing followed: the place of an exception."""
    module_steps: Sequence[ModuleStep] = ()
    """The steps that `forward` and `backward` are of."""
    samples_per_second: float | None = None
    """None: no samples were logged."""
    tokens_per_second: float | None = None
    """None: no tokens were logged."""
    evaluation_s: float = 0.0
    """Time of all evaluations."""
    folded_calls: int = 0
    """Module calls beyond `max_spans`, which have no span; their time is in the spans above them."""


def summarise(units: Iterable[RecordLine], spans: Iterable[SpanLine]) -> Summary:
    """Add up the lines of a run; spans are looked at one by one and not kept."""
    counts: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    failures = _Failures()
    steps, evaluation_s = [], 0.0
    tracks = Tracks()
    for unit in units:
        counts[_kind(unit)] += max(1, unit.folded)
        tracks.add(unit)
        failures.add(unit)
        if unit.error_type:
            errors[unit.error_type] += 1
        if _kind(unit) == "evaluation":
            evaluation_s += unit.folded_s or unit.duration_s
        if unit.kind == "step":
            # What the tracks have taken in is not kept: norms of many layers would be most of the memory.
            steps.append(unit._replace(values={}, gradient_norms={}, nonfinite=()))
    tracked, wall_s = tracks.result(), _wall_s(steps)
    in_steps, in_evaluations = _read_layers(spans)
    layers = in_steps if counts["step"] else in_evaluations
    return Summary(
        steps=counts["step"],
        evaluations=counts["evaluation"],
        detailed_steps=sum(step.detailed for step in steps),
        errors=dict(errors.most_common()),
        first_failure=failures.first,
        last_failure=failures.last,
        last_step=failures.last_step,
        unfinished_step=failures.unfinished_step,
        phases=_phases(steps),
        forward=layers.slowest("forward"),
        backward=layers.slowest("backward"),
        tracked=tracked,
        module_steps=_module_steps(steps, in_steps),
        steps_per_second=len(steps) / wall_s if wall_s else None,
        samples_per_second=_rate(tracked.totals.get("samples"), wall_s),
        tokens_per_second=_rate(tracked.totals.get("tokens"), wall_s),
        evaluation_s=evaluation_s,
        folded_calls=layers.folded_calls,
    )


def _read_layers(spans: Iterable[SpanLine]) -> tuple["_Layers", "_Layers"]:
    """Return the layers of training steps, and those of evaluations."""
    in_steps, in_evaluations = _Layers(), _Layers()
    for span in spans:
        (in_steps if names.STEP_NUMBER in span.attributes else in_evaluations).add(span)
    return in_steps, in_evaluations


def _module_steps(steps: Sequence[RecordLine], layers: "_Layers") -> Sequence[ModuleStep]:
    return [
        ModuleStep(
            step.phases.get("forward", 0.0),
            step.phases.get("backward", 0.0),
            layers.outermost_ns[step.trace_id] / 1e9,
            layers.outermost_calls[step.trace_id],
        )
        for step in steps
        if step.trace_id in layers.outermost_calls
    ]


def _wall_s(steps: Sequence[RecordLine]) -> float:
    """Return the time from the first step's start to the last step's end, by the wall clock."""
    if not steps:
        return 0.0
    began_ns = min(step.start_unix_ns for step in steps)
    return max((step.start_unix_ns - began_ns) / 1e9 + step.duration_s for step in steps)


def _rate(total: float | None, wall_s: float) -> float | None:
    return total / wall_s if total is not None and wall_s else None


def ending(summary: Summary, info: Mapping[str, Any]) -> Failure | None:
    """Return what ended the run: the exception that left the program, at the last failed step if none followed."""
    failure, error = summary.last_failure, info.get("error") or {}
    if "type" not in error:
        return None if info.get("finished") else failure
    found = failure or summary.unfinished_step or Failure("", "", "", "", 0, summary.last_step)
    return found._replace(type=error["type"], message=error.get("message", ""))


def _kind(unit: RecordLine) -> str:
    """Return what a line counts as: a failed forward in training mode was no evaluation, but a training step's."""
    trains = unit.kind == "evaluation" and unit.grad and unit.training
    return "forward" if trains and unit.error_type else unit.kind


@dataclass(slots=True)
class _Failures:
    """Find the first failure, and the last; a step may be written after evaluations that followed it."""

    first: Failure | None = None
    last: Failure | None = None
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

    def add(self, unit: RecordLine) -> None:
        if unit.kind == "log":
            return
        failure = self._failure(unit) if unit.error_type else None
        end_ns = unit.start_unix_ns + int(unit.duration_s * 1e9)
        if end_ns >= self._latest_ns:
            self._latest_ns, self.last = end_ns, failure
        if failure is not None and self.first is None:
            self.first, self._first_ns = failure, end_ns
        if unit.kind == "step":
            self._next = unit.number + 1
        if failure is None and unit.kind == "step":
            stepped = unit.phases.get("optimizer", 0.0) > 0
            self._unfinished_ns, self._unfinished = end_ns, None
            if self._has_optimizer and not stepped:
                self._unfinished = Failure("", "", "", "step", unit.number, self.last_step)
            self._has_optimizer |= stepped
            self.last_step = unit.number
            if self.first is not None and end_ns < self._first_ns:
                self.first = self.first._replace(last_step=unit.number)
            if self.last is not None:
                self.last = self.last._replace(last_step=unit.number)

    def _failure(self, unit: RecordLine) -> Failure:
        kind, number = unit.kind, unit.number
        if _kind(unit) == "forward":  # the step that it would have been
            kind, number = "step", self._next
        text, last = unit.error_message or "", self.last_step
        return Failure(unit.error_type or "", text, unit.error_path, kind, number, last, unit.error_phase)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Read the quantile of sorted numbers, between two of them where it falls there."""
    place = share * (len(ordered) - 1)
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _phases(steps: Sequence[RecordLine]) -> Sequence[PhaseTime]:
    if not steps:
        return ()
    whole = sum(step.duration_s for step in steps)
    rows = [("step", sorted(step.duration_s for step in steps))]
    known = set().union(*(step.phases for step in steps))  # runs of earlier versions have no "between"
    rows += [(name, sorted(step.phases.get(name, 0.0) for step in steps)) for name in PHASES if name in known]
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


class _Key(NamedTuple):
    model: str
    path: str
    direction: str


@dataclass(slots=True)
class _Tally:
    key: _Key
    type: str
    calls: int = 0
    total_ns: int = 0
    inner_ns: int = 0
    longest_ns: int = 0
    inner_calls: int = 0


@dataclass(slots=True)
class _OpenTrace:
    tallies: dict[str, _Tally] = field(default_factory=dict)
    """By span id."""
    early: dict[str, list[tuple[_Tally, int]]] = field(default_factory=dict)
    """Calls whose parent has not come yet, with their nanoseconds, by the parent's span id."""


class _Layers:
    """Times of module calls, without keeping the spans."""

    def __init__(self) -> None:
        self.folded_calls = 0
        self.outermost_ns: Counter[str] = Counter()
        """Time of the forward calls that are in no other module call, by trace id."""
        self.outermost_calls: Counter[str] = Counter()
        self._tallies: dict[_Key, _Tally] = {}
        self._traces: OrderedDict[str, _OpenTrace] = OrderedDict()
        self._inner: set[tuple[str, str]] = set()
        """Models and paths of the modules that another module of their model called."""

    def add(self, span: SpanLine) -> None:
        folded = span.attributes.get(names.FOLDED_CALLS)
        self.folded_calls += folded if isinstance(folded, int) else 0
        path = span.attributes.get(names.MODULE_PATH)
        if path is None or names.MODULE_TYPE not in span.attributes:  # a failed root names the module that raised
            return
        duration_ns = max(0, span.end_ns - span.start_ns)
        tally = self._tally(span, str(path))
        tally.calls += 1
        tally.total_ns += duration_ns
        tally.longest_ns = max(tally.longest_ns, duration_ns)
        if tally.key.direction == "forward":
            self.outermost_ns[span.trace_id] += duration_ns
            self.outermost_calls[span.trace_id] += 1
        trace = self._trace(span.trace_id)
        trace.tallies[span.span_id] = tally
        for inner, inner_ns in trace.early.pop(span.span_id, ()):
            self._add_inner(span.trace_id, tally, inner, inner_ns)
        parent = trace.tallies.get(span.parent_id)
        if parent is not None:
            self._add_inner(span.trace_id, parent, tally, duration_ns)
        else:
            trace.early.setdefault(span.parent_id, []).append((tally, duration_ns))

    def _add_inner(self, trace_id: str, outer: _Tally, inner: _Tally, duration_ns: int) -> None:
        outer.inner_ns += duration_ns
        outer.inner_calls += 1
        if inner.key.direction == "forward":
            self.outermost_ns[trace_id] -= duration_ns
            self.outermost_calls[trace_id] -= 1
        # The calls of a wrapper (DistributedDataParallel) and of the module in it have the same path.
        if outer.key.model == inner.key.model and outer.key.path != inner.key.path:
            self._inner.add((inner.key.model, inner.key.path))

    def _is_root(self, tally: _Tally) -> bool:
        """Tell a model from its layers: its path is its class, which a layer's path can be as well."""
        model, path, _ = tally.key
        is_class = path in {tally.type, model} or model.startswith(f"{path}-")
        return is_class and (model, path) not in self._inner

    def slowest(self, direction: str) -> Sequence[LayerTime]:
        chosen = [(key, tally) for key, tally in self._tallies.items() if key.direction == direction]
        whole = sum(max(0, tally.total_ns - tally.inner_ns) for _, tally in chosen)
        rows = []
        for key, tally in chosen:
            # A child may stick out of its parent where an end is an upper bound.
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
                    is_root=self._is_root(tally),
                )
            )
        return sorted(rows, key=lambda row: (-row.self_s, row.path))

    def _tally(self, span: SpanLine, path: str) -> _Tally:
        read = span.attributes.get
        key = _Key(str(read(names.MODEL, "")), path, str(read(names.DIRECTION, "forward")))
        if key not in self._tallies:
            self._tallies[key] = _Tally(key, str(read(names.MODULE_TYPE, "")))
        return self._tallies[key]

    def _trace(self, trace_id: str) -> _OpenTrace:
        trace = self._traces.get(trace_id)
        if trace is None:
            trace = self._traces[trace_id] = _OpenTrace()
            if len(self._traces) > _OPEN_TRACES:
                self._traces.popitem(last=False)
        return trace
