"""Numbers over the steps of a run, and how they are brought down to what a screen can show; pure."""

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from torchotel.report.read import UnitLine
from torchotel.report.summary import PHASES
from torchotel.report.tracked import COUNTED, FIRST

MOST_LAYERS = 4_000
MOST_LOGGED = 12
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
    norms: "dict[str, array[float]]" = field(default_factory=dict)
    """By layer, one number for each of those steps: NaN where there is none, infinite where it was not finite."""
    layers_left_out: int = 0
    logged: "dict[str, tuple[array[int], array[float]]]" = field(default_factory=dict)
    """Step numbers and values by the name that they were logged under."""
    began_unix_ns: int = 0
    ended_unix_ns: int = 0

    def add(self, unit: UnitLine) -> None:
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

    def _add_norms(self, unit: UnitLine) -> None:
        looked_at = len(self.norm_steps)
        self.norm_steps.append(unit.number)
        several = len(unit.gradient_norms) > 1
        for model, norms in unit.gradient_norms.items():
            for path, norm in norms.items():
                name = f"{model}: {path}" if several else path
                row = self.norms.get(name)
                if row is None:
                    if len(self.norms) >= MOST_LAYERS:
                        self.layers_left_out += 1
                        continue
                    row = self.norms[name] = array("f")
                row.extend([MISSING] * (looked_at - len(row)))
                row.append(NONFINITE if norm is None else norm)

    def _add_logged(self, unit: UnitLine) -> None:
        values = [(name, value) for name, value in unit.values.items() if name not in COUNTED]
        if unit.gradient_norm is not None:
            values.append(("gradient norm", unit.gradient_norm))
        for name, value in values:
            # Epochs only count up, and truths are no numbers.
            if isinstance(value, bool) or not isinstance(value, int | float) or name == "epoch":
                continue
            if name not in self.logged and len(self.logged) >= MOST_LOGGED:
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
