"""Comparison of two sides of runs: what takes longer, by how much, and whether that is noise; pure.

See `ratios.py` for the statistics and their sources. Many intervals are looked at together, and of a hundred
intervals of 95 % five would mislead, so the intervals of all that can fail are widened to hold together. The step,
the phases and the layers have equal shares of the error (weighted Bonferroni), so that many layers do not widen the
step's interval. What is shown and cannot fail is widened with all that is shown.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Literal, NamedTuple, TypeAlias, get_args

from torchotel.report.conditions import Difference, differences
from torchotel.report.info import RunError
from torchotel.report.ratios import FEWEST, Ratio, ratio, ratio_of_runs, typical
from torchotel.report.summary import PHASES, quantile
from torchotel.report.times import LayerKey, RunTimes, StepTimes, warm

Series: TypeAlias = Sequence[Sequence[float]]
"""The same times of each run of a side, in seconds, without those that warmed up."""
Pair: TypeAlias = tuple[Series, Series]
Gate: TypeAlias = Literal["step", "phases", "all"]
"""What can fail: the step | its phases as well | the layers as well."""

Kind: TypeAlias = Literal["step", "phase", "layer"]

GATES: tuple[Gate, ...] = get_args(Gate)
CONFIDENCE = 0.98
"""That all intervals hold, of those that can fail: a little less does where a short run's steps are alike, and 95 % is
what is meant to be left."""
SMALL = 0.01
"""Share of the step's time on both sides below which a phase or a layer is shown but not judged."""
CANNOT_TELL = "can't tell"
TOO_FEW = "too few steps"


class Spread(NamedTuple):
    """Where the middle of one side lies, and how wide it is: of a run's steps, or of several runs' medians."""

    steps: int
    """Of the shortest run."""
    median_s: float
    half_width: float
    """Half of the distance between the quartiles, as a share of the middle."""


class Row(NamedTuple):
    """One thing on both sides."""

    name: str
    kind: Kind
    before: Spread
    after: Spread
    is_judged: bool
    """Whether it can fail: it is asked for, and not too little of the step."""
    is_small: bool
    """Too little of the step to be judged."""
    change: Ratio | None = None
    """None: too few steps to tell."""

    @property
    def is_enough(self) -> bool:
        """Whether there are steps enough to tell noise."""
        return min(self.before.steps, self.after.steps) >= FEWEST

    @property
    def added_s(self) -> float:
        """What a step takes longer by it."""
        return self.after.median_s - self.before.median_s

    def verdict(self, limit: float) -> str:
        """Say what to make of it; REGRESSION is what fails."""
        if self.change is None:
            return TOO_FEW
        if self.change.is_noise:
            # A regression could hide in it.
            return CANNOT_TELL if self.change.high > 1 + limit and not self.is_small else "noise"
        if self.change.value < 1:
            return "faster"
        if self.is_small:
            return "slower, but small"
        return "REGRESSION" if self.is_judged and self.change.value > 1 + limit else "slower"


@dataclass(frozen=True, kw_only=True)
class Diff:
    """What two sides have in common, compared, and what only one of them has."""

    runs: tuple[int, int]
    compared: str
    """Which steps: plain | detailed | all."""
    steps: Sequence[Row]
    """The whole step, then its phases."""
    layers: Sequence[Row]
    """Those that cost a step the most more than before first."""
    only_before: Sequence[str]
    only_after: Sequence[str]
    differences: Sequence[Difference]
    """What else is not the same."""

    @property
    def judged(self) -> Sequence[Row]:
        """What can fail."""
        return [row for row in (*self.steps, *self.layers) if row.is_judged]

    def regressions(self, limit: float) -> Sequence[Row]:
        """Give what got slower by more than `limit`, noise and trifles aside."""
        return [row for row in self.judged if row.verdict(limit) == "REGRESSION"]

    def untold(self, limit: float) -> Sequence[Row]:
        """Give what can fail and may have got slower by more than `limit`, or not: too little was recorded to tell."""
        return [row for row in self.judged if row.verdict(limit) in {CANNOT_TELL, TOO_FEW}]


def compare(before: Sequence[RunTimes], after: Sequence[RunTimes], gate: Gate = "all") -> Diff:
    """Compare the second side with the first, of one run or more each.

    Raises:
        RunError: a run has too few steps.
    """
    compared, sides = _comparable(before, after)
    step = _pair([run.whole_s for run in side] for side in sides)
    fewest = [min(map(len, series)) for series in step]
    if min(fewest) < FEWEST:
        raise RunError(
            f"{fewest[0]} and {fewest[1]} steps are left to compare when failed ones and the warm-up are "
            f"left out, and it takes {FEWEST} of each run: record longer runs"
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
        differences=differences([run.conditions for run in before], [run.conditions for run in after]),
    )


def _comparable(
    before: Sequence[RunTimes], after: Sequence[RunTimes]
) -> tuple[str, tuple[Sequence[StepTimes], Sequence[StepTimes]]]:
    """Choose like for like: detail costs time, so its steps are not set against those without."""
    pairs = {
        kind: (
            [run.steps.of_kind(detailed=detailed) for run in before],
            [run.steps.of_kind(detailed=detailed) for run in after],
        )
        for kind, detailed in (("plain", False), ("detailed", True))
    }
    fewest = {kind: min(len(warm(run.whole_s)) for run in chain(*pair)) for kind, pair in pairs.items()}
    kind = max(fewest, key=lambda kind: fewest[kind])
    if fewest[kind] >= FEWEST:
        return kind, pairs[kind]
    return "all", ([run.steps for run in before], [run.steps for run in after])


def _pair(sides: Iterable[Iterable[Sequence[float]]]) -> Pair:
    before, after = ([warm(series) for series in side] for side in sides)
    return before, after


def _layers(
    before: Sequence[RunTimes], after: Sequence[RunTimes]
) -> tuple[Mapping[str, Pair], Sequence[Sequence[str]]]:
    """Give the layers of both sides, and the names of those that only one has."""
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
        shares = (side.median_s / whole if whole else 0.0 for side, whole in zip((before, after), whole_s, strict=True))
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
    ordered, middle = sorted(medians), typical(medians)
    if len(series) == 1:
        ordered, middle = sorted(series[0]), medians[0]
    width = quantile(ordered, 0.75) - quantile(ordered, 0.25)
    return Spread(steps, middle, width / 2 / middle if middle else 0.0)
