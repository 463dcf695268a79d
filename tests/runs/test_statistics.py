"""Test the confidence interval of a ratio of medians."""

import math
import random

import pytest

from torchotel.runs import statistics
from torchotel.runs.compare import CONFIDENCE
from torchotel.runs.statistics import Ratio, ratio, ratio_of_runs, typical


@pytest.mark.parametrize(
    ("confidence", "freedom", "reach"),
    [(0.95, 3, 3.182446), (0.95, 4, 2.776445), (0.99, 6, 3.707428), (0.999, 12, 4.317791)],
)
def test_reads_students_t_as_the_tables_do(confidence: float, freedom: int, reach: float) -> None:
    assert statistics._student(confidence, freedom) == pytest.approx(reach, abs=1e-6)


def test_agrees_with_r_on_several_runs() -> None:
    """R's `t.test(extra ~ group, sleep, var.equal = TRUE)` gives -3.363874 and 0.203874, here as logarithms."""
    one, other = (
        [math.exp(extra) for extra in group]
        for group in (
            (0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0),
            (1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4),
        )
    )
    found = ratio_of_runs(other, one, confidence=0.95)
    assert [math.log(value) for value in found] == pytest.approx([-1.58, -3.363874, 0.203874], abs=1e-6)
    assert typical(one) / typical(other) == pytest.approx(found.value)


def _steps(chance: random.Random, count: int, likeness: float, noise: float = 0.1) -> list[float]:
    """Return steps of 100 ms with noise and autocorrelation."""
    state = chance.gauss(0, 1)
    steps = []
    for _ in range(count):
        state = likeness * state + math.sqrt(1 - likeness**2) * chance.gauss(0, 1)
        steps.append(0.1 * math.exp(noise * state))
    return steps


@pytest.mark.parametrize(("count", "likeness"), [(5, 0.0), (20, 0.0), (60, 0.0), (60, 0.5), (300, 0.5), (1000, 0.9)])
def test_takes_no_noise_for_a_change(count: int, likeness: float) -> None:
    """Fewer than one in twenty pairs of equal runs shows a change, even with correlated steps."""
    chance = random.Random(5)
    pairs = 200
    deceived = sum(
        not ratio(_steps(chance, count, likeness), _steps(chance, count, likeness), confidence=CONFIDENCE).is_noise
        for _ in range(pairs)
    )
    assert deceived < 0.05 * pairs


@pytest.mark.parametrize("dwell", [5, 20])
def test_takes_no_jumps_between_two_speeds_for_a_change(dwell: int) -> None:
    """Jumps between two speeds, as on a shared machine, are no change; the interval hardly exceeds the two speeds."""
    chance = random.Random(5)

    def steps() -> list[float]:
        fast, made = chance.random() < 0.5, []
        for _ in range(250):
            fast ^= chance.random() < 1 / dwell
            made.append((0.1 if fast else 0.16) * math.exp(chance.gauss(0, 0.05)))
        return made

    found = [ratio(steps(), steps(), confidence=CONFIDENCE) for _ in range(200)]
    assert sum(not one.is_noise for one in found) < 0.05 * len(found)
    assert all(one.low > 0.25 and one.high < 4 for one in found)


def test_is_not_deceived_by_steps_that_take_turns() -> None:
    """Alternating steps, as with gradient accumulation over two batches, do not count as persistence."""
    steps = [0.1 if place % 2 else 0.2 for place in range(61)]
    assert ratio(steps, steps[1:] + steps[1:2], confidence=CONFIDENCE).is_noise


def test_takes_a_drift_within_the_runs_for_noise() -> None:
    """A drift of a fifth within each run is noise, although B starts where A was after a third."""
    chance = random.Random(8)
    before, after = (
        [(1 + (start + place) / 500) * step for place, step in enumerate(_steps(chance, 100, 0.0, noise=0.01))]
        for start in (0, 33)
    )
    assert ratio(before, after, confidence=0.95).is_noise
    shuffled = [chance.sample(steps, len(steps)) for steps in (before, after)]
    assert not ratio(*shuffled, confidence=0.95).is_noise


def test_finds_a_change_of_five_percent_in_a_hundred_steps() -> None:
    chance = random.Random(6)
    before, after = _steps(chance, 100, 0.0), [1.1 * step for step in _steps(chance, 100, 0.0)]
    found = ratio(before, after, confidence=0.95)
    assert not found.is_noise
    assert found.value == pytest.approx(1.1, rel=0.05)


def test_is_not_moved_by_a_few_steps_that_hung() -> None:
    chance = random.Random(7)
    steps = _steps(chance, 60, 0.0)
    hung = [step if place % 20 else 60.0 for place, step in enumerate(steps)]
    assert ratio(steps, hung, confidence=0.95).is_noise


def test_reads_the_median_between_order_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds are order statistics: 2.4469 (t for six cosines) times half of 1/10 is 12.2 % of the steps."""
    monkeypatch.setattr(statistics, "_persistence", lambda _: 1.0)
    steps = [0.1 + place / 1000 for place in range(100)]
    low, middle, high = statistics._median(steps, 0.95)
    assert [math.exp(value) for value in (low, middle, high)] == pytest.approx([0.13739, 0.1495, 0.16161], abs=1e-5)
    assert statistics._median([step + 10 if step > 0.18 else step for step in steps], 0.95) == (low, middle, high)


def test_takes_times_of_zero() -> None:
    assert ratio([0.0] * 5, [0.0] * 5, confidence=0.95) == Ratio(1, 1, 1)
    assert not ratio([0.0] * 5, [0.001] * 5, confidence=0.95).is_noise
    assert ratio_of_runs([0.0] * 2, [0.0], confidence=0.95) == pytest.approx(Ratio(1, 1, 1))
