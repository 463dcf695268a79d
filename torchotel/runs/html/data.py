"""Collect what the report page shows, in one pass over a run."""

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from torchotel import _semconv as names
from torchotel.runs.compare import WARM_UP_STEPS
from torchotel.runs.reader import RecordLine, Run, SpanLine
from torchotel.runs.summary import PHASES, Summary, summarise
from torchotel.runs.value_ranges import COUNTED, FIRST, LayerId, layer_names

MAX_LAYERS = 4_000
MAX_LOGGED = 12
NEAR_MEDIAN = 0.1
"""Relative distance of a step's time up to which it is called a median step."""
MISSING, NONFINITE = math.nan, math.inf

Item = TypeVar("Item")


class StepTime(NamedTuple):
    """One training step."""

    number: int
    duration_s: float
    phases_s: tuple[float, ...]
    """In the order of PHASES."""
    detailed: bool


class Bucket(NamedTuple):
    """Steps in a row, of which three are shown: real ones, so that an outlier is never averaged away."""

    first: int
    last: int
    steps: int
    fastest: StepTime
    median: StepTime
    slowest: StepTime


@dataclass(slots=True)
class Series:
    """Take in the lines of a run one by one, and keep the numbers that figures need."""

    steps: list[StepTime] = field(default_factory=list)
    norm_steps: "array[int]" = field(default_factory=lambda: array("q"))
    """Numbers of the steps whose gradients were looked at."""
    layer_norms: "dict[LayerId, array[float]]" = field(default_factory=dict)
    """By layer, one number for each of those steps: NaN where there is none, infinite where it was not finite."""
    layers_left_out: int = 0
    logged: "dict[str, tuple[array[int], array[float]]]" = field(default_factory=dict)
    """Step numbers and values by the name that they were logged under."""
    began_unix_ns: int = 0
    ended_unix_ns: int = 0

    @property
    def norms(self) -> "Mapping[str, array[float]]":
        """`layer_norms` by the names of the layers."""
        named = layer_names(self.layer_norms)
        return {named[layer]: row for layer, row in self.layer_norms.items()}

    def add(self, unit: RecordLine) -> None:
        """Take in a step; evaluations have no place on the axis of steps."""
        if unit.kind == "evaluation":
            return
        self._add_logged(unit)
        if unit.kind != "step":
            return
        phases_s = tuple(unit.phases.get(name, 0.0) for name in PHASES)
        self.steps.append(StepTime(unit.number, unit.duration_s, phases_s, unit.detailed))
        self.began_unix_ns = self.began_unix_ns or unit.start_unix_ns
        self.ended_unix_ns = unit.start_unix_ns + int(unit.duration_s * 1e9)
        if unit.gradient_norms:
            self._add_norms(unit)

    def _add_norms(self, unit: RecordLine) -> None:
        looked_at = len(self.norm_steps)
        self.norm_steps.append(unit.number)
        for model, norms in unit.gradient_norms.items():
            for path, norm in norms.items():
                layer = LayerId(model, path)
                row = self.layer_norms.get(layer)
                if row is None:
                    if len(self.layer_norms) >= MAX_LAYERS:
                        self.layers_left_out += 1
                        continue
                    row = self.layer_norms[layer] = array("f")
                row.extend([MISSING] * (looked_at - len(row)))
                row.append(NONFINITE if norm is None else norm)

    def _add_logged(self, unit: RecordLine) -> None:
        values = [(name, value) for name, value in unit.values.items() if name not in COUNTED]
        if unit.gradient_norm is not None:
            values.append(("gradient norm", unit.gradient_norm))
        for name, value in values:
            # Epochs only count up, and truths are no numbers.
            if isinstance(value, bool) or not isinstance(value, int | float) or name == "epoch":
                continue
            if name not in self.logged and len(self.logged) >= MAX_LOGGED:
                continue
            numbers, known = self.logged.setdefault(name, (array("q"), array("d")))
            numbers.append(unit.number)
            known.append(value)

    def logged_in_order(self) -> Sequence[str]:
        """Name what was logged: loss and learning rate first."""
        return sorted(self.logged, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))


def chunks(items: Sequence[Item], most: int) -> Iterator[Sequence[Item]]:
    """Cut a sequence into at most so many parts of equal length; the last one may be shorter."""
    length = max(1, math.ceil(len(items) / most))
    return (items[start : start + length] for start in range(0, len(items), length))


def buckets(steps: Sequence[StepTime], most: int) -> Sequence[Bucket]:
    """Bring steps down to at most so many buckets."""
    return [_bucket(part) for part in chunks(steps, most)]


def _bucket(steps: Sequence[StepTime]) -> Bucket:
    ordered = sorted(steps, key=lambda step: step.duration_s)
    return Bucket(steps[0].number, steps[-1].number, len(steps), ordered[0], ordered[len(ordered) // 2], ordered[-1])


def spread(values: Sequence[float], pick: Callable[[Sequence[float]], float]) -> float:
    """Pick one of the finite values, `MISSING` where there is none."""
    finite = [value for value in values if math.isfinite(value)]
    return pick(finite) if finite else MISSING


def middle(values: Sequence[float]) -> float:
    """Pick the median, a value that was really there."""
    return sorted(values)[len(values) // 2]


_MAX_DEVICES = 64
_MAX_SPANS = 20_000
"""Of one trace; torchotel writes 2,000 by default, a stranger any number."""


@dataclass(frozen=True)
class StepTrace:
    """One step with its spans."""

    number: int
    duration_s: float
    detailed: bool
    """Whether it has spans of modules."""
    root: SpanLine
    spans: Sequence[SpanLine]
    """All of them, the root included."""


@dataclass
class Traces:
    """Take in the spans of a run, and keep those of three steps; a trace is written in one piece.

    Args:
        median_s: How long a step takes.
    """

    median_s: float
    slowest: StepTrace | None = None
    slowest_later: StepTrace | None = None
    """Without the first steps."""
    median: StepTrace | None = None
    """The one whose time is closest to the median; one with detail where there is any."""
    detailed: int = 0
    """Steps whose modules could be read: the spans of others were deleted, or left out by a sampler."""
    devices: set[str] = field(default_factory=set)
    """Those that modules ran on."""
    _open: list[SpanLine] = field(default_factory=list)

    def add(self, span: SpanLine) -> None:
        """Take in a span."""
        if self._open and self._open[0].trace_id != span.trace_id:
            self.close()
        device = span.attributes.get(names.DEVICE)
        if isinstance(device, str) and len(self.devices) < _MAX_DEVICES:
            self.devices.add(device)
        if len(self._open) < _MAX_SPANS:
            self._open.append(span)

    def close(self) -> None:
        """Take the spans so far for a whole trace."""
        step = _step(self._open)
        self._open = []
        if step is None:
            return
        self.detailed += step.detailed
        self.slowest = _better(self.slowest, step, lambda one: one.duration_s)
        if step.number >= WARM_UP_STEPS:
            self.slowest_later = _better(self.slowest_later, step, lambda one: one.duration_s)
        self.median = _better(self.median, step, lambda one: (one.detailed, -abs(one.duration_s - self.median_s)))

    def chosen(self) -> Sequence[tuple[str, StepTrace]]:
        """Name the steps to show, slowest first; the slowest after the first ones too, where that is another."""
        found = [("Slowest step", self.slowest)]
        if self.slowest is not self.slowest_later:
            found.append((f"Slowest step after the first {WARM_UP_STEPS}", self.slowest_later))
        found.append((self._median_title(), self.median))
        return [(title, step) for title, step in found if step is not None]

    def _median_title(self) -> str:
        step = self.median
        if step is None or abs(step.duration_s - self.median_s) <= NEAR_MEDIAN * self.median_s:
            return "Median step"
        return f"{'Detailed' if step.detailed else 'Recorded'} step nearest to the median"


def _better(
    known: StepTrace | None, new: StepTrace, rank: Callable[[StepTrace], tuple[bool, float] | float]
) -> StepTrace:
    return new if known is None or rank(new) > rank(known) else known  # type: ignore[operator] # one kind of rank a call


def _step(spans: Sequence[SpanLine]) -> StepTrace | None:
    root = next((span for span in spans if span.name == names.SPAN_STEP), None)
    if root is None:
        return None
    number = root.attributes.get(names.STEP_NUMBER)
    return StepTrace(
        number=number if isinstance(number, int) else 0,
        duration_s=max(0, root.end_ns - root.start_ns) / 1e9,
        detailed=any(names.MODULE_TYPE in span.attributes for span in spans),
        root=root,
        spans=spans,
    )


Line = TypeVar("Line")


@dataclass(frozen=True)
class Content:
    """What the page is made from."""

    name: str
    """Of the run's folder."""
    info: Mapping[str, Any]
    summary: Summary
    series: Series
    traces: Traces

    @property
    def median_s(self) -> float:
        """How long a typical step takes; 0 where there was none."""
        return self.summary.phases[0].p50_s if self.summary.phases else 0.0


def gather(run: Run) -> Content:
    """Read a run; what is kept is bounded by its steps and layers, not by its spans.

    Raises:
        RunError: a file is damaged.
    """
    series = Series()
    traces = Traces(0.0)

    def spans() -> Iterator[SpanLine]:
        # Nothing runs here before the first span is asked for, and then all steps are known.
        durations = sorted(step.duration_s for step in series.steps)
        traces.median_s = durations[len(durations) // 2] if durations else 0.0
        yield from _watched(run.spans(), traces.add)
        traces.close()

    summary = summarise(_watched(run.units(), series.add), spans())
    return Content(run.folder.resolve().name, run.info, summary, series, traces)


def _watched(lines: Iterable[Line], watch: Callable[[Line], None]) -> Iterator[Line]:
    for line in lines:
        watch(line)
        yield line
