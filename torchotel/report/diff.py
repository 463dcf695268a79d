"""Two runs side by side: what takes longer, by how much, and whether that is noise; pure.

See `ratios.py` for the statistic and its sources. Many things are looked at at once, and of a hundred intervals of 95 %
five would mislead, so those of the step, its phases and its layers are widened to hold all together (Bonferroni).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, TypeAlias

from torchotel.report.info import RunError
from torchotel.report.ratios import FEWEST, Ratio, ratio
from torchotel.report.summary import PHASES, quantile
from torchotel.report.times import LayerKey, RunTimes, StepTimes, warm

Pair: TypeAlias = tuple[Sequence[float], Sequence[float]]
"""The same times of both runs, in seconds."""

CONFIDENCE = 0.98
"""That all intervals hold, of those that can fail: a little less does where a short run's steps are alike, and 95 % is
what is meant to be left."""
SMALL = 0.01
"""Share of the step's time in both runs below which a phase or a layer is shown but not judged."""


class Spread(NamedTuple):
    """Where the middle of a series lies, and how wide it is."""

    steps: int
    median_s: float
    half_width: float
    """Half of the distance between the quartiles, as a share of the median."""


class Row(NamedTuple):
    """One thing in both runs."""

    name: str
    before: Spread
    after: Spread
    change: Ratio | None
    """None: too few steps to tell."""
    small: bool
    """Too little of the step to be judged."""

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
            return "too few steps"
        if self.change.is_noise:
            return "noise"
        if self.change.value < 1:
            return "faster"
        if self.small:
            return "slower, but small"
        return "REGRESSION" if self.change.value > 1 + limit else "slower"


@dataclass(frozen=True, kw_only=True)
class Diff:
    """What two runs have in common, compared, and what only one of them has."""

    compared: str
    """Which steps: plain | detailed | all."""
    steps: Sequence[Row]
    """The whole step, then its phases."""
    layers: Sequence[Row]
    """Those that cost a step the most more than before first."""
    only_before: Sequence[str]
    only_after: Sequence[str]

    def regressions(self, limit: float) -> Sequence[Row]:
        """Give what got slower by more than `limit`, noise and trifles aside."""
        return [row for row in (*self.steps, *self.layers) if row.verdict(limit) == "REGRESSION"]


def compare(before: RunTimes, after: RunTimes) -> Diff:
    """Compare the second run with the first.

    Raises:
        RunError: one of them has too few steps.
    """
    compared, pair = _comparable(before, after)
    wholes = [warm(times.whole_s) for times in pair]
    if min(map(len, wholes)) < FEWEST:
        raise RunError(
            f"{len(wholes[0])} and {len(wholes[1])} steps are left to compare when failed ones and the warm-up are "
            f"left out, and it takes {FEWEST} of each run: record longer runs"
        )
    step_s = [median(whole) for whole in wholes]
    phases = {name: (pair[0].phases_s[name], pair[1].phases_s[name]) for name in PHASES}
    seen = {name: series for name, series in phases.items() if any(map(any, series))}
    common = before.layers_s.keys() & after.layers_s.keys()
    several = len({key.model for key in (*before.layers_s, *after.layers_s)}) > 1
    layers = {_name(key, several=several): (before.layers_s[key], after.layers_s[key]) for key in common}
    parts = {"step": (pair[0].whole_s, pair[1].whole_s), **seen}
    steps, of_layers = _rows(parts, step_s), _rows(layers, step_s)
    judged = sum(not row.small and row.is_enough for row in (*steps, *of_layers))
    confidence = 1 - (1 - CONFIDENCE) / max(1, judged)
    return Diff(
        compared=compared,
        steps=_with_changes(steps, parts, confidence),
        layers=sorted(_with_changes(of_layers, layers, confidence), key=lambda row: (-abs(row.added_s), row.name)),
        only_before=sorted(_name(key, several=several) for key in before.layers_s.keys() - common),
        only_after=sorted(_name(key, several=several) for key in after.layers_s.keys() - common),
    )


def _comparable(before: RunTimes, after: RunTimes) -> tuple[str, tuple[StepTimes, StepTimes]]:
    """Choose like for like: detail costs time, so its steps are not set against those without."""
    pairs = {
        kind: (before.steps.of_kind(detailed=detailed), after.steps.of_kind(detailed=detailed))
        for kind, detailed in (("plain", False), ("detailed", True))
    }
    fewest = {kind: min(len(warm(times.whole_s)) for times in pair) for kind, pair in pairs.items()}
    kind = max(fewest, key=lambda kind: fewest[kind])
    if fewest[kind] >= FEWEST:
        return kind, pairs[kind]
    return "all", (before.steps, after.steps)


def _name(key: LayerKey, *, several: bool) -> str:
    return f"{key.direction} {key.model}: {key.path}" if several else f"{key.direction} {key.path}"


def _rows(series: Mapping[str, Pair], step_s: Sequence[float]) -> Sequence[Row]:
    rows = []
    for name, (before, after) in series.items():
        spreads = _spread(warm(before)), _spread(warm(after))
        shares = (spread.median_s / whole if whole else 0.0 for spread, whole in zip(spreads, step_s, strict=True))
        rows.append(Row(name, *spreads, change=None, small=max(shares) < SMALL))
    return rows


def _with_changes(rows: Sequence[Row], series: Mapping[str, Pair], confidence: float) -> Sequence[Row]:
    def change(row: Row) -> Ratio | None:
        before, after = map(warm, series[row.name])
        return ratio(before, after, confidence=confidence) if row.is_enough else None

    return [row._replace(change=change(row)) for row in rows]


def _spread(series: Sequence[float]) -> Spread:
    ordered = sorted(series)
    if not ordered:
        return Spread(0, 0.0, 0.0)
    middle = quantile(ordered, 0.5)
    width = quantile(ordered, 0.75) - quantile(ordered, 0.25)
    return Spread(len(ordered), middle, width / 2 / middle if middle else 0.0)
