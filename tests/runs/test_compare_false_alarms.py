"""Count how often `torchotel diff` finds changes in pairs of simulated runs of equal code."""

from __future__ import annotations

import math
import random
from array import array

import pytest

from torchotel._records import PHASES
from torchotel.runs.compare import CANNOT_TELL, Diff, RunTimes, StepTimes, compare
from torchotel.runs.reader import LayerKey

PAIRS = 300
LIMIT = 0.05
NOISE = 0.05
"""Share of a step's time that is independent of the step before."""

QUIET = {"noise", CANNOT_TELL}


def _series(chance: random.Random, steps: int, likeness: float, factor: float = 1.0) -> array[float]:
    """Return steps of 100 ms with autocorrelation (AR(1))."""
    noise = chance.gauss(0, NOISE / math.sqrt(1 - likeness**2))
    series = array("d")
    for _ in range(steps):
        series.append(0.1 * factor * math.exp(noise))
        noise = likeness * noise + chance.gauss(0, NOISE)
    return series


def _run(chance: random.Random, steps: int, likeness: float, layers: int, factor: float = 1.0) -> RunTimes:
    no_phases = {name: array("d", bytes(8 * steps)) for name in PHASES}
    return RunTimes(
        steps=StepTimes(_series(chance, steps, likeness, factor), no_phases, bytearray(steps)),
        layers_s={
            LayerKey("Net", str(place), "forward"): _series(chance, steps, likeness, factor) for place in range(layers)
        },
    )


def _diffs(steps: int, likeness: float, layers: int, factor: float = 1.0) -> list[Diff]:
    chance = random.Random(5)
    run = (chance, steps, likeness, layers)
    return [compare([_run(*run)], [_run(*run, factor)]) for _ in range(PAIRS)]


@pytest.mark.parametrize(
    ("steps", "likeness", "layers"),
    [(10, 0.5, 9), (20, 0.0, 9), (20, 0.5, 9), (60, 0.0, 9), (60, 0.8, 9), (100, 0.8, 9), (500, 0.95, 0)],
)
def test_cries_wolf_in_less_than_one_pair_of_twenty(steps: int, likeness: float, layers: int) -> None:
    diffs = _diffs(steps, likeness, layers)
    assert _loud(diffs) < 0.05 * PAIRS


@pytest.mark.parametrize("runs", [(1, 5), (3, 3), (5, 5)])
@pytest.mark.parametrize("spread", [0.03, 0.1])
def test_cries_no_wolf_where_runs_differ_as_wholes(runs: tuple[int, int], spread: float) -> None:
    """Runs that differ in their speed as a whole, as on a shared machine, cause few false alarms."""
    chance = random.Random(5)

    def side(count: int) -> list[RunTimes]:
        return [_run(chance, 20, 0.0, 3, math.exp(chance.gauss(0, spread))) for _ in range(count)]

    assert _loud([compare(side(runs[0]), side(runs[1])) for _ in range(PAIRS)]) < 0.05 * PAIRS


def _loud(diffs: list[Diff]) -> int:
    """Count the diffs in which any part is slower or faster."""
    return sum(any(row.verdict(LIMIT) not in QUIET for row in (*diff.steps, *diff.layers)) for diff in diffs)


def test_finds_what_is_slower_by_a_fifth_in_nine_of_ten_pairs() -> None:
    diffs = _diffs(60, 0.0, 9, 1.2)
    found = sum(diff.steps[0].verdict(LIMIT) == "REGRESSION" for diff in diffs)
    assert found > 0.9 * PAIRS
