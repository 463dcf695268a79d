"""Compare two runs, or two groups of runs, by phase and layer."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import median
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from torchotel import _semconv as names
from torchotel._records import PHASES, PROCESS_ENDED_TYPE
from torchotel.runs.reader import Call, LayerKey, Run, RunError, SpanLine, calls_by_trace
from torchotel.runs.statistics import MIN_STEPS, Ratio, ratio, ratio_of_runs, typical
from torchotel.runs.summary import quantile

RunEnvironment: TypeAlias = Mapping[str, str]
"""Texts by name; names without a value are left out."""

_RESOURCE = {
    "host": "host.name",
    "torch": names.TORCH_VERSION,
    "CUDA": names.CUDA_VERSION,
    "ranks": names.WORLD_SIZE,
    "rank": names.RANK,
}
_SETTINGS = (
    "detail",
    "overhead_budget",
    "include",
    "exclude",
    "max_depth",
    "max_spans",
    "shapes",
    "gradient_norms",
    "module_histograms",
    "traces_exporter",
    "tracer_provider",
    "worker",
)
"""Settings that change the cost of a step, or its set of layers."""
_ENDS = {True: "finished", False: "not ended, or cut short"}


class Difference(NamedTuple):
    """A property of the runs that differs between the two sides."""

    name: str
    before: str
    after: str


def run_environment(info: Mapping[str, Any], devices: Iterable[str]) -> RunEnvironment:
    """Return the program, machine, versions and settings of a run, from its `run.json` and the modules' devices."""
    resource, settings, model = (info.get(part) or {} for part in ("resource", "config", "model"))
    texts = {
        "program": _text(info.get("service_name")),
        "model": _model(model) if model else "",
        "device": ", ".join(sorted(devices)),
        "torchotel": _text(info.get("torchotel.version")),
        **{name: _text(resource.get(key)) for name, key in _RESOURCE.items()},
        # A setting that is None is not in `run.json`.
        **({name: _text(settings.get(name)) or "None" for name in _SETTINGS} if settings else {}),
        "end": run_end(info),
    }
    return {name: text for name, text in texts.items() if text}


def differences(before: Sequence[RunEnvironment], after: Sequence[RunEnvironment]) -> Sequence[Difference]:
    """Return the names that both sides have with different values. A side of several runs can have several values."""
    all_names = dict.fromkeys(name for run in (*before, *after) for name in run)
    result = []
    for name in all_names:
        values = [sorted({run[name] for run in side if name in run}) for side in (before, after)]
        if all(values) and values[0] != values[1]:
            result.append(Difference(name, *map(", ".join, values)))
    return result


def run_end(info: Mapping[str, Any]) -> str:
    """Return how a run ended, by its `run.json`; empty if unknown."""
    error = _text((info.get("error") or {}).get("type"))
    if error == PROCESS_ENDED_TYPE:
        return "ended without a shutdown, as after SIGKILL"
    return f"ended with {error}" if error else _ENDS.get(info.get("finished", ""), "")


def _model(model: Mapping[str, Any]) -> str:
    return f"{model.get('name', '?')}, {model.get('modules', 0):,} modules, {model.get('parameters', 0):,} parameters"


def _text(value: object) -> str:
    """Return a plain value, or a list of plain values, as text; other values are left out."""
    values = value if isinstance(value, list) else [value]
    return ", ".join(str(value) for value in values if isinstance(value, str | int | float))


WARM_UP_STEPS = 10
"""Largest number of warm-up steps, as many as are detailed at the start of a run."""
WARM_UP_SHARE = 0.2
"""Share of warm-up steps in a short series."""


@dataclass
class StepTimes:
    """Seconds of steps in their order: the whole steps, and each phase."""

    whole_s: array[float] = field(default_factory=lambda: array("d"))
    phases_s: Mapping[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in PHASES})
    detailed: bytearray = field(default_factory=bytearray)
    """Whether modules were recorded in the step, which takes time."""

    def of_kind(self, *, detailed: bool) -> StepTimes:
        """Return the steps with detail, or the steps without."""

        def select(series: array[float]) -> array[float]:
            return array("d", (time_s for time_s, kind in zip(series, self.detailed, strict=True) if kind == detailed))

        phases = {name: select(series) for name, series in self.phases_s.items()}
        return StepTimes(select(self.whole_s), phases)


@dataclass(frozen=True, kw_only=True)
class RunTimes:
    """The times of a run's steps, except failed steps, which ended early."""

    steps: StepTimes
    layers_s: Mapping[LayerKey, array[float]]
    """Seconds of self time of all calls in a detailed step, one value a step."""
    run_environment: RunEnvironment = field(default_factory=dict)


def read_times(run: Run) -> RunTimes:
    """Read the times of a run once. Memory: one number for each phase of a step and layer of a detailed step."""
    steps, failed = StepTimes(), set()
    for record in run.records():
        if record.kind != "step":
            continue
        if record.error_type:
            failed.add(record.trace_id)
            continue
        steps.whole_s.append(record.duration_s)
        steps.detailed.append(record.detailed)
        for name, series in steps.phases_s.items():
            series.append(record.phases.get(name, 0.0))
    layers, devices = _layer_times(run.spans(), failed)
    return RunTimes(steps=steps, layers_s=layers, run_environment=run_environment(run.info, devices))


def warm(series: Sequence[float]) -> Sequence[float]:
    """Return a series without its warm-up: the first fifth of the steps, at least one and at most ten."""
    return series[min(WARM_UP_STEPS, max(1, int(WARM_UP_SHARE * len(series)))) :]


def _layer_times(spans: Iterable[SpanLine], failed: set[str]) -> tuple[Mapping[LayerKey, array[float]], set[str]]:
    """Return the layers' times, and the devices that the layers ran on."""
    layers: dict[LayerKey, array[float]] = defaultdict(lambda: array("d"))
    devices: set[str] = set()
    # A module's span without a step number belongs to an evaluation.
    in_steps = (span for span in spans if names.STEP_NUMBER in span.attributes)
    for trace_id, calls in calls_by_trace(in_steps):
        devices |= {device for call in calls if isinstance(device := call.span.attributes.get(names.DEVICE), str)}
        if trace_id not in failed:
            for layer, time_s in self_times(calls).items():
                layers[layer].append(time_s)
    return layers, devices


def self_times(calls: Iterable[Call]) -> Mapping[LayerKey, float]:
    """Return the seconds of self time of the layers in one trace."""
    times_ns: Counter[LayerKey] = Counter()
    for span, layer, outer in calls:
        times_ns[layer] += span.duration_ns
        if outer is not None:
            times_ns[outer] -= span.duration_ns
    # A child can end after its parent if its end is an upper bound.
    return {layer: max(0, self_ns) / 1e9 for layer, self_ns in times_ns.items()}


Series: TypeAlias = Sequence[Sequence[float]]
"""The same times, in seconds, of each run of a side, without warm-up."""
Pair: TypeAlias = tuple[Series, Series]
Gate: TypeAlias = Literal["step", "phases", "all"]
"""Times that can fail: the step | the step and its phases | all including layers."""

Kind: TypeAlias = Literal["step", "phase", "layer"]

GATES: tuple[Gate, ...] = get_args(Gate)
CONFIDENCE = 0.98
"""Probability that all intervals of times that can fail hold together. For autocorrelated steps of a short run the
actual probability is a little lower; 95 % is the aim."""
SMALL = 0.01
"""Share of the step's time, on both sides, below which a phase or a layer is shown but does not fail."""
CANNOT_TELL = "can't tell"
TOO_FEW = "too few steps"


class Spread(NamedTuple):
    """The median of one side and its spread: of a run's steps, or of several runs' medians."""

    steps: int
    """Steps of the shortest run."""
    median_s: float
    half_width: float
    """Half of the interquartile range, as a share of the median."""


class Row(NamedTuple):
    """One time on both sides: of the step, a phase or a layer."""

    name: str
    kind: Kind
    before: Spread
    after: Spread
    is_judged: bool
    """Whether the row can fail: `--fail-on` includes it, and it is not small."""
    is_small: bool
    """Whether the time is less than the share `SMALL` of the step."""
    change: Ratio | None = None
    """None: too few steps for an interval."""

    @property
    def is_enough(self) -> bool:
        """Whether both sides have enough steps for an interval."""
        return min(self.before.steps, self.after.steps) >= MIN_STEPS

    @property
    def added_s(self) -> float:
        """Seconds by which a step is longer on the second side."""
        return self.after.median_s - self.before.median_s

    def verdict(self, limit: float) -> str:
        """Return the verdict in words; REGRESSION fails."""
        if self.change is None:
            return TOO_FEW
        if self.change.is_noise:
            # The interval may contain a regression.
            return CANNOT_TELL if self.change.high > 1 + limit and not self.is_small else "noise"
        if self.change.value < 1:
            return "faster"
        if self.is_small:
            return "slower, but small"
        return "REGRESSION" if self.is_judged and self.change.value > 1 + limit else "slower"


@dataclass(frozen=True, kw_only=True)
class Diff:
    """The comparison of two sides: common times, and layers that only one side has."""

    runs: tuple[int, int]
    compared: str
    """Kind of steps that are compared: plain | detailed | all."""
    steps: Sequence[Row]
    """The whole step, then its phases."""
    layers: Sequence[Row]
    """Layers on both sides, the largest change first."""
    only_before: Sequence[str]
    only_after: Sequence[str]
    differences: Sequence[Difference]
    """Differences of machine, versions and settings."""

    @property
    def judged(self) -> Sequence[Row]:
        """The rows that can fail."""
        return [row for row in (*self.steps, *self.layers) if row.is_judged]

    def regressions(self, limit: float) -> Sequence[Row]:
        """Return the rows that are slower by more than `limit` beyond noise."""
        return [row for row in self.judged if row.verdict(limit) == "REGRESSION"]

    def undecided(self, limit: float) -> Sequence[Row]:
        """Return the rows that can fail and whose interval neither shows nor excludes a regression of `limit`."""
        return [row for row in self.judged if row.verdict(limit) in {CANNOT_TELL, TOO_FEW}]


def compare(before: Sequence[RunTimes], after: Sequence[RunTimes], gate: Gate = "all") -> Diff:
    """Compare the second side with the first; each side has one run or more.

    Raises:
        RunError: A run has too few steps.
    """
    compared, sides = _comparable(before, after)
    step = _pair([run.whole_s for run in side] for side in sides)
    fewest = [min(map(len, series)) for series in step]
    if min(fewest) < MIN_STEPS:
        raise RunError(
            f"{fewest[0]} and {fewest[1]} steps are left to compare when failed ones and the warm-up are "
            f"left out, and it takes {MIN_STEPS} of each run: record longer runs"
        )
    phases = {name: _pair([run.phases_s[name] for run in side] for side in sides) for name in PHASES}
    parts = {"step": step, **{name: pair for name, pair in phases.items() if any(map(any, chain(*pair)))}}
    layers, only = _layers(before, after)
    can_fail = {"step": {"step"}, "phases": parts.keys(), "all": parts.keys() | layers.keys()}[gate]
    kinds: dict[str, Kind] = {**dict.fromkeys(layers, "layer"), **dict.fromkeys(parts, "phase"), "step": "step"}
    rows = _rows({**parts, **layers}, kinds, can_fail)
    return Diff(
        runs=(len(before), len(after)),
        compared=compared,
        steps=rows[: len(parts)],
        layers=sorted(rows[len(parts) :], key=lambda row: (-abs(row.added_s), row.name)),
        only_before=only[0],
        only_after=only[1],
        differences=differences([run.run_environment for run in before], [run.run_environment for run in after]),
    )


def _comparable(
    before: Sequence[RunTimes], after: Sequence[RunTimes]
) -> tuple[str, tuple[Sequence[StepTimes], Sequence[StepTimes]]]:
    """Choose steps of one kind on both sides: steps with detail take longer than steps without."""
    pairs = {
        kind: (
            [run.steps.of_kind(detailed=detailed) for run in before],
            [run.steps.of_kind(detailed=detailed) for run in after],
        )
        for kind, detailed in (("plain", False), ("detailed", True))
    }
    fewest = {kind: min(len(warm(run.whole_s)) for run in chain(*pair)) for kind, pair in pairs.items()}
    kind = max(fewest, key=lambda kind: fewest[kind])
    if fewest[kind] >= MIN_STEPS:
        return kind, pairs[kind]
    return "all", ([run.steps for run in before], [run.steps for run in after])


def _pair(sides: Iterable[Iterable[Sequence[float]]]) -> Pair:
    before, after = ([warm(series) for series in side] for side in sides)
    return before, after


def _layers(
    before: Sequence[RunTimes], after: Sequence[RunTimes]
) -> tuple[Mapping[str, Pair], Sequence[Sequence[str]]]:
    """Return the common layers, and the names of the layers that only one side has."""
    keys = [{key for run in side for key in run.layers_s} for side in (before, after)]
    several = len({key.model for key in chain(*keys)}) > 1
    layers = {
        _name(key, several=several): _pair([run.layers_s.get(key, ()) for run in side] for side in (before, after))
        for key in keys[0] & keys[1]
    }
    only = [sorted(_name(key, several=several) for key in side - other) for side, other in (keys, keys[::-1])]
    return layers, only


def _name(key: LayerKey, *, several: bool) -> str:
    return f"{key.direction} {key.model}: {key.path}" if several else f"{key.direction} {key.path}"


def _rows(pairs: Mapping[str, Pair], kinds: Mapping[str, Kind], can_fail: Collection[str]) -> Sequence[Row]:
    whole_s = [_spread(series).median_s for series in pairs["step"]]
    rows = []
    for name, pair in pairs.items():
        before, after = map(_spread, pair)
        shares = (
            side.median_s / step_s if step_s else 0.0 for side, step_s in zip((before, after), whole_s, strict=True)
        )
        is_small = max(shares) < SMALL
        rows.append(Row(name, kinds[name], before, after, name in can_fail and not is_small, is_small))
    shown = Counter(row.kind for row in rows if row.is_enough and not row.is_small)
    judged = Counter(row.kind for row in rows if row.is_enough and row.is_judged)
    return [
        row._replace(change=_change(pairs[row.name], _confidence(row.kind, judged if row.is_judged else shown)))
        if row.is_enough
        else row
        for row in rows
    ]


def _confidence(kind: Kind, family: Counter[Kind]) -> float:
    """Return the confidence of one interval, so that all hold; each kind has an equal share of the error."""
    return 1 - (1 - CONFIDENCE) / max(1, len(family)) / max(1, family[kind])


def _change(pair: Pair, confidence: float) -> Ratio:
    before, after = pair
    if before == after:
        # Times that agree to the nanosecond are one recording, compared with itself.
        return Ratio(1.0, 1.0, 1.0)
    if len(before) == len(after) == 1:
        return ratio(before[0], after[0], confidence=confidence)
    return ratio_of_runs(list(map(median, before)), list(map(median, after)), confidence=confidence)


def _spread(series: Series) -> Spread:
    steps = min(map(len, series))
    medians = [median(run) for run in series if run]
    if not medians:
        return Spread(steps, 0.0, 0.0)
    ordered, center = sorted(medians), typical(medians)
    if len(series) == 1:
        ordered, center = sorted(series[0]), medians[0]
    width = quantile(ordered, 0.75) - quantile(ordered, 0.25)
    return Spread(steps, center, width / 2 / center if center else 0.0)
