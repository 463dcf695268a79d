"""The interval of a ratio of medians."""

import math
import random

import pytest

from torchotel.report import ratios
from torchotel.report.ratios import Ratio, ratio

BEFORE = [32, 39, 26, 35, 43, 27, 40, 37, 34, 29, 49, 42, 40]
AFTER = [36, 44, 47, 42, 49, 39, 46, 31, 33, 48]


def test_agrees_with_the_authors_own_software(monkeypatch: pytest.MonkeyPatch) -> None:
    """statpsych's documentation of ci.ratio.median2 gives 43 / 37: 1.162162, 0.927667, 1.455933."""
    monkeypatch.setattr(ratios, "BLOCKS", range(13, 31))  # every value a block of its own
    assert ratio(BEFORE, AFTER, confidence=0.95) == pytest.approx((1.162162, 0.927667, 1.455933), abs=1e-6)


def _steps(chance: random.Random, count: int, likeness: float) -> list[float]:
    """Make steps of 100 ms and 10 % of noise, each so much like the one before it."""
    noise = chance.gauss(0, 1)
    steps = []
    for _ in range(count):
        noise = likeness * noise + math.sqrt(1 - likeness**2) * chance.gauss(0, 1)
        steps.append(0.1 * math.exp(0.1 * noise))
    return steps


@pytest.mark.parametrize(("count", "likeness"), [(5, 0.0), (20, 0.0), (60, 0.0), (60, 0.5), (300, 0.5), (1000, 0.9)])
def test_takes_no_noise_for_a_change(count: int, likeness: float) -> None:
    """At 95 % one pair in twenty may deceive, also where neighbouring steps are alike."""
    chance = random.Random(5)
    pairs = 200
    deceived = sum(
        not ratio(_steps(chance, count, likeness), _steps(chance, count, likeness), confidence=0.95).is_noise
        for _ in range(pairs)
    )
    assert deceived <= 0.09 * pairs


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
