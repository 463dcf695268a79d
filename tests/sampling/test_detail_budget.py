"""What detail costs, measured step by step, and held within its budget: only the lengths of steps are made up."""

import random
from collections.abc import Callable

import pytest

from torchotel._records import StepRecord
from torchotel.sampling.detail import MAX_INTERVAL, MIN_INTERVAL, Detail, Overhead, sampling_interval

MS = 1_000_000


def step(length_ns: float, *, detailed: bool, reason: str = "sampled") -> StepRecord:
    return StepRecord("step", 0, 0, round(length_ns), 10**18, 1, detailed, reason if detailed else None)


def test_overhead_is_measured_against_steps_without_detail() -> None:
    """One step in four takes twice as long: a quarter of the time of the others."""
    cost = Overhead()
    cost.add(step(900, detailed=True))  # the very first warms up
    for number in range(1, 21):
        assert (cost.ratio is None) == (number < 21)
        cost.add(step(200 if number % 4 == 0 else 100, detailed=number % 4 == 0))
    assert cost.ratio == 0.25
    assert cost.upper_bound == 1.0
    for number in range(1, 33):
        cost.add(step(50 if number % 4 == 0 else 100, detailed=number % 4 == 0))
    assert cost.ratio == 0, "most of those that count took no longer"


def test_a_warm_up_is_no_overhead() -> None:
    """The first steps are detailed and slow, and would be so without us: the ratio is that of the steps after them."""
    cost = Overhead()
    for _ in range(10):
        cost.add(step(400, detailed=True, reason="first"))
    for number in range(10, 90):
        assert number > 80 or cost.ratio is None, "the fifth detailed step is the 80th"
        cost.add(step(26 if number % 16 == 0 else 10, detailed=number % 16 == 0))
    assert cost.ratio == pytest.approx(5 / 80 * 1.6)


def test_a_slower_epoch_is_no_overhead() -> None:
    """Each detailed step is compared with those just before it."""
    cost = Overhead()
    for number in range(200):
        length = 100 if number < 100 else 1000
        cost.add(step(length * (1.2 if number % 8 == 0 else 1), detailed=number % 8 == 0))
    assert cost.ratio == pytest.approx(0.2 / 8, rel=0.05)


@pytest.mark.parametrize(
    ("budget", "longer", "now", "every"),
    [
        (0.01, 0.2, 8, 32),  # what is too dear becomes rarer at once
        (0.01, 0.2, 1024, 512),  # and more frequent step by step
        (0.01, 0.33, 64, 64),
        (0.01, -0.1, 4, MIN_INTERVAL),
        (0.01, -0.1, MIN_INTERVAL, MIN_INTERVAL),
        (1.0, 0.9, 64, 32),
        (0.001, 50.0, 8, MAX_INTERVAL),
    ],
)
def test_how_often(budget: float, longer: float, now: int, every: int) -> None:
    assert sampling_interval(budget, longer, now) == every


def trained(budget: float, longer: float, noise: Callable[[], float], steps: int) -> tuple[Detail, float, float]:
    """Steer through many steps; give what detail cost in the second half of them, and what was measured."""
    detail, cost = Detail("auto"), Overhead()
    plain_ms = detail_ms = 0.0
    for number in range(steps):
        detailed = detail.of_step(number)
        length_ms = 10 * noise()
        spent_ms = longer * length_ms if detailed else 0.0
        cost.add(step((length_ms + spent_ms) * MS, detailed=detailed, reason=detail.reason(number)))
        if detailed and cost.upper_bound is not None:
            detail.every = sampling_interval(budget, cost.upper_bound, detail.every)
        if number >= steps // 2:
            plain_ms, detail_ms = plain_ms + length_ms, detail_ms + spent_ms
    assert cost.ratio is not None
    return detail, detail_ms / plain_ms, cost.ratio


@pytest.mark.parametrize("spread", [0.0, 0.3])
@pytest.mark.parametrize("longer", [0.01, 0.25, 5.0])
@pytest.mark.parametrize("budget", [0.002, 0.01, 0.05])
def test_the_budget_holds(budget: float, longer: float, spread: float) -> None:
    """Whatever detail costs and however steps differ, it takes its share and no more; among even ones near to it."""
    source = random.Random(7)
    detail, spent, measured = trained(budget, longer, lambda: source.lognormvariate(0, spread), steps=16_384)
    assert spent <= budget * 1.15  # of one draw: which steps happen to be detailed is chance
    if spread == 0 and MIN_INTERVAL < detail.every < MAX_INTERVAL:
        assert spent > budget / 2.3
    if spread == 0:
        assert measured == pytest.approx(longer / detail.every, rel=0.3)


@pytest.mark.parametrize("period", [2, 8, 10, 64, 100])
def test_what_the_program_does_now_and_then_is_not_what_detail_costs(period: int) -> None:
    """Whoever logs or saves every so many steps meets detail by chance alone."""
    detail, cost = Detail("auto"), Overhead()
    for number in range(4096):
        detailed = detail.of_step(number)
        length_ms = (10.2 if detailed else 10) + (4 if number % period == 0 else 0)
        cost.add(step(length_ms * MS, detailed=detailed, reason=detail.reason(number)))
        if detailed and cost.upper_bound is not None:
            detail.every = sampling_interval(0.01, cost.upper_bound, detail.every)
    assert detail.every <= 64
    assert cost.ratio is not None
    assert cost.ratio <= 0.01


def test_what_costs_nothing_is_had_often() -> None:
    """Every second step: the others are what it is measured against."""
    detail, _, measured = trained(0.01, 0.0, lambda: 1.0, steps=200)
    assert detail.every == MIN_INTERVAL
    assert measured == 0
