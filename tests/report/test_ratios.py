"""The interval of a ratio of medians."""

import math
import random
from statistics import NormalDist

import pytest

from torchotel.report import ratios
from torchotel.report.diff import CONFIDENCE
from torchotel.report.ratios import Ratio, ratio, ratio_of_runs, typical

BEFORE = [32, 39, 26, 35, 43, 27, 40, 37, 34, 29, 49, 42, 40]
AFTER = [36, 44, 47, 42, 49, 39, 46, 31, 33, 48]


def test_agrees_with_the_authors_own_software(monkeypatch: pytest.MonkeyPatch) -> None:
    """statpsych's documentation of ci.ratio.median2 gives 43 / 37: 1.162162, 0.927667, 1.455933."""
    # It takes the values to be unlike their neighbours, and the normal distribution.
    monkeypatch.setattr(ratios, "_persistence", lambda _: 1.0)
    monkeypatch.setattr(ratios, "_student", lambda confidence, _: NormalDist().inv_cdf(0.5 + confidence / 2))
    assert ratio(BEFORE, AFTER, confidence=0.95) == pytest.approx((1.162162, 0.927667, 1.455933), abs=1e-6)


@pytest.mark.parametrize(
    ("confidence", "freedom", "reach"),
    [(0.95, 3, 3.182446), (0.95, 4, 2.776445), (0.99, 6, 3.707428), (0.999, 12, 4.317791)],
)
def test_reads_students_t_as_the_tables_do(confidence: float, freedom: int, reach: float) -> None:
    assert ratios._student(confidence, freedom) == pytest.approx(reach, abs=1e-6)


def test_equal_errors_have_the_freedom_of_both() -> None:
    """Whatever floating point makes of them (Welch and Satterthwaite)."""
    generator = random.Random(0)
    errors = [generator.uniform(1e-4, 1) for _ in range(1000)]
    assert {ratios._freedom((error, error), (6, 6)) for error in errors} == {12}


def test_agrees_with_r_on_several_runs() -> None:
    """`t.test(extra ~ group, sleep, var.equal = TRUE)` gives -3.363874 and 0.203874; here they are logarithms."""
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
    """Make steps of 100 ms with so much noise, each so much like the one before it."""
    state = chance.gauss(0, 1)
    steps = []
    for _ in range(count):
        state = likeness * state + math.sqrt(1 - likeness**2) * chance.gauss(0, 1)
        steps.append(0.1 * math.exp(noise * state))
    return steps


@pytest.mark.parametrize(("count", "likeness"), [(5, 0.0), (20, 0.0), (60, 0.0), (60, 0.5), (300, 0.5), (1000, 0.9)])
def test_takes_no_noise_for_a_change(count: int, likeness: float) -> None:
    """Less than one pair in twenty deceives, also where neighbouring steps are alike."""
    chance = random.Random(5)
    pairs = 200
    deceived = sum(
        not ratio(_steps(chance, count, likeness), _steps(chance, count, likeness), confidence=CONFIDENCE).is_noise
        for _ in range(pairs)
    )
    assert deceived < 0.05 * pairs


def test_is_not_deceived_by_steps_that_take_turns() -> None:
    """As with gradients that are accumulated over two: sides of the median that alternate tell of no persistence."""
    steps = [0.1 if place % 2 else 0.2 for place in range(61)]
    assert ratio(steps, steps[1:] + steps[1:2], confidence=CONFIDENCE).is_noise


def test_takes_a_drift_within_the_runs_for_noise() -> None:
    """Steps get slower by a fifth from start to end, and B starts where A had got a third of the way."""
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


def test_takes_times_of_zero() -> None:
    assert ratio([0.0] * 5, [0.0] * 5, confidence=0.95) == Ratio(1, 1, 1)
    assert not ratio([0.0] * 5, [0.001] * 5, confidence=0.95).is_noise
    assert ratio_of_runs([0.0] * 2, [0.0], confidence=0.95) == pytest.approx(Ratio(1, 1, 1))
