"""Collect the data of the report page in one pass over a run."""

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from torchotel import _semconv as names
from torchotel._records import PHASES
from torchotel.runs.compare import WARM_UP_STEPS
from torchotel.runs.rank_folders import run_name
from torchotel.runs.reader import RecordLine, Run, SpanLine
from torchotel.runs.slow_rank import RankComparison, compare_ranks
from torchotel.runs.summary import Summary, summarise
from torchotel.runs.value_ranges import LayerId, layer_names

MAX_LAYERS = 4_000
MAX_LOGGED = 12
NEAR_MEDIAN = 0.1
"""Relative distance from the median up to which a step is called a median step."""
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
    """Consecutive steps, drawn as their fastest, median and slowest step. No step is averaged, so outliers stay."""

    first: int
    last: int
    steps: int
    fastest: StepTime
    median: StepTime
    slowest: StepTime


@dataclass(slots=True)
class Series:
    """Collect the series that the figures need from the lines of a run."""

    steps: list[StepTime] = field(default_factory=list)
    norm_steps: "array[int]" = field(default_factory=lambda: array("q"))
    """Numbers of the steps with gradient norms."""
    layer_norms: "dict[LayerId, array[float]]" = field(default_factory=dict)
    """Norms by layer, one for each of `norm_steps`: NaN if the step has none, infinite if it was not finite."""
    layers_left_out: int = 0
    logged: "dict[str, tuple[array[int], array[float]]]" = field(default_factory=dict)
    """Step numbers and values by logged name."""
    began_unix_ns: int = 0
    ended_unix_ns: int = 0

    @property
    def norms(self) -> "Mapping[str, array[float]]":
        """Return `layer_norms` by the display names of the layers."""
        named = layer_names(self.layer_norms)
        return {named[layer]: row for layer, row in self.layer_norms.items()}

    def add(self, record: RecordLine) -> None:
        """Add a step or logged values; evaluations are left out."""
        if record.kind == "evaluation":
            return
        self._add_logged(record)
        if record.kind != "step":
            return
        phases_s = tuple(record.phases.get(name, 0.0) for name in PHASES)
        self.steps.append(StepTime(record.number, record.duration_s, phases_s, record.detailed))
        self.began_unix_ns = self.began_unix_ns or record.start_unix_ns
        self.ended_unix_ns = record.start_unix_ns + int(record.duration_s * 1e9)
        if record.gradient_norms:
            self._add_norms(record)

    def _add_norms(self, record: RecordLine) -> None:
        steps_before = len(self.norm_steps)
        self.norm_steps.append(record.number)
        for model, norms in record.gradient_norms.items():
            for path, norm in norms.items():
                layer = LayerId(model, path)
                row = self.layer_norms.get(layer)
                if row is None:
                    if len(self.layer_norms) >= MAX_LAYERS:
                        self.layers_left_out += 1
                        continue
                    row = self.layer_norms[layer] = array("f")
                row.extend([MISSING] * (steps_before - len(row)))
                row.append(NONFINITE if norm is None else norm)

    def _add_logged(self, record: RecordLine) -> None:
        values = [(name, value) for name, value in record.values.items() if name not in names.LOGGED_COUNTS]
        if record.gradient_norm is not None:
            values.append(("gradient norm", record.gradient_norm))
        for name, value in values:
            # Epochs only count up; booleans are not drawn.
            if isinstance(value, bool) or not isinstance(value, int | float) or name == "epoch":
                continue
            if name not in self.logged and len(self.logged) >= MAX_LOGGED:
                continue
            numbers, stored = self.logged.setdefault(name, (array("q"), array("d")))
            numbers.append(record.number)
            stored.append(value)

    def logged_in_order(self) -> Sequence[str]:
        """Return the logged names, loss and learning rate first."""
        order = {name: place for place, name in enumerate(names.LOGGED_NAMES)}
        return sorted(self.logged, key=lambda name: (order.get(name, len(order)), name))


def chunks(items: Sequence[Item], max_parts: int) -> Iterator[Sequence[Item]]:
    """Split a sequence into at most `max_parts` parts of equal length; the last part may be shorter.

    The length is odd, so that a part has one item in the middle, its median.
    """
    length = math.ceil(len(items) / max_parts) | 1
    return (items[start : start + length] for start in range(0, len(items), length))


def buckets(steps: Sequence[StepTime], max_buckets: int) -> Sequence[Bucket]:
    """Group steps into at most `max_buckets` buckets."""
    return [_bucket(part) for part in chunks(steps, max_buckets)]


def _bucket(steps: Sequence[StepTime]) -> Bucket:
    ordered = sorted(steps, key=lambda step: step.duration_s)
    median = ordered[(len(ordered) - 1) // 2]  # of an even number, the lower one of the two in the middle
    return Bucket(steps[0].number, steps[-1].number, len(steps), ordered[0], median, ordered[-1])


def pick_finite(values: Sequence[float], choose: Callable[[Sequence[float]], float]) -> float:
    """Apply `choose` to the finite values; `MISSING` if there is none."""
    finite = [value for value in values if math.isfinite(value)]
    return choose(finite) if finite else MISSING


def upper_median(values: Sequence[float]) -> float:
    """Return the median, or the upper one of the two middle values, so that it is a value of the series."""
    return sorted(values)[len(values) // 2]


_MAX_DEVICES = 64
_MAX_SPANS = 20_000
"""Largest number of spans read of one trace. torchotel's own limit is 2,000 by default."""


@dataclass(frozen=True)
class StepTrace:
    """One step with its spans."""

    number: int
    duration_s: float
    detailed: bool
    """Whether the step has module spans."""
    root: SpanLine
    spans: Sequence[SpanLine]
    """All spans of the step, including the root."""


@dataclass
class StepTraceSelector:
    """Select three steps from the spans of a run. The run file writes a trace as a whole, so its spans are consecutive.

    Args:
        median_s: Seconds of the median step.
    """

    median_s: float
    slowest: StepTrace | None = None
    slowest_later: StepTrace | None = None
    """The slowest step after the warm-up."""
    median: StepTrace | None = None
    """The step closest to the median; a detailed step if the run has any."""
    detailed: int = 0
    """Steps with module spans. The spans of other steps were not recorded, deleted or sampled out."""
    devices: set[str] = field(default_factory=set)
    """Devices that modules ran on."""
    _open: list[SpanLine] = field(default_factory=list)

    def add(self, span: SpanLine) -> None:
        """Add a span."""
        if self._open and self._open[0].trace_id != span.trace_id:
            self.close()
        device = span.attributes.get(names.DEVICE)
        if isinstance(device, str) and len(self.devices) < _MAX_DEVICES:
            self.devices.add(device)
        if len(self._open) < _MAX_SPANS:
            self._open.append(span)

    def close(self) -> None:
        """End the current trace and compare its step with the selected ones."""
        step = _step(self._open)
        self._open = []
        if step is None:
            return
        self.detailed += step.detailed
        self.slowest = _higher_ranked(self.slowest, step, lambda step: step.duration_s)
        if step.number >= WARM_UP_STEPS:
            self.slowest_later = _higher_ranked(self.slowest_later, step, lambda step: step.duration_s)
        self.median = _higher_ranked(
            self.median, step, lambda step: (step.detailed, -abs(step.duration_s - self.median_s))
        )

    def selected(self) -> Sequence[tuple[str, StepTrace]]:
        """Return the selected steps with their titles: the slowest, the slowest after the warm-up, the median."""
        titled_steps = [("Slowest step", self.slowest)]
        if self.slowest is not self.slowest_later:
            titled_steps.append((f"Slowest step after the first {WARM_UP_STEPS}", self.slowest_later))
        titled_steps.append((self._median_title(), self.median))
        return [(title, step) for title, step in titled_steps if step is not None]

    def _median_title(self) -> str:
        step = self.median
        if step is None or abs(step.duration_s - self.median_s) <= NEAR_MEDIAN * self.median_s:
            return "Median step"
        return f"{'Detailed' if step.detailed else 'Recorded'} step nearest to the median"


def _higher_ranked(
    stored: StepTrace | None, candidate: StepTrace, rank: Callable[[StepTrace], tuple[bool, float] | float]
) -> StepTrace:
    return candidate if stored is None or rank(candidate) > rank(stored) else stored  # type: ignore[operator] # one kind of rank a call


def _step(spans: Sequence[SpanLine]) -> StepTrace | None:
    root = next((span for span in spans if names.is_step(span.name)), None)
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
    """The content of the report page."""

    name: str
    """Name of the run's folder."""
    info: Mapping[str, Any]
    summary: Summary
    series: Series
    traces: StepTraceSelector
    ranks: RankComparison | None = None
    """The ranks of the run; None: only one rank was read."""

    @property
    def median_s(self) -> float:
        """Seconds of the median step; 0 if the run has no step."""
        return self.summary.phases[0].p50_s if self.summary.phases else 0.0


def gather(run: Run, *others: Run) -> Content:
    """Read a run, and compare it with its other ranks. Memory is bounded by the number of steps and layers.

    Raises:
        RunError: A file is damaged.
    """
    series = Series()
    traces = StepTraceSelector(0.0)

    def spans() -> Iterator[SpanLine]:
        # `summarise` reads all step records before it asks for the first span.
        durations = sorted(step.duration_s for step in series.steps)
        traces.median_s = durations[len(durations) // 2] if durations else 0.0
        yield from _observed(run.spans(), traces.add)
        traces.close()

    summary = summarise(_observed(run.records(), series.add), spans())
    runs = [run, *others]
    ranks = compare_ranks(runs) if others else None
    return Content(run_name(runs), run.info, summary, series, traces, ranks)


def _observed(lines: Iterable[Line], on_line: Callable[[Line], None]) -> Iterator[Line]:
    for line in lines:
        on_line(line)
        yield line
