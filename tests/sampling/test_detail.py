"""Which steps "auto" records in detail, by their numbers."""

import pytest

from torchotel.sampling.detail import Detail, is_chosen

POWERS = [2**power for power in range(1, 13)]


@pytest.mark.parametrize("every", POWERS)
def test_one_of_each_block_is_chosen(every: int) -> None:
    """And that is chosen of the smaller blocks too, so that ranks which chose differently share the rarer steps."""
    chosen = [number for number in range(16 * 4096) if is_chosen(number, every)]
    assert [number // every for number in chosen] == list(range(16 * 4096 // every))
    assert all(is_chosen(number, every // 2) for number in chosen)


@pytest.mark.parametrize("every", POWERS[2:8])
@pytest.mark.parametrize("period", [2, 7, 8, 10, 64])
def test_no_rhythm_is_followed(every: int, period: int) -> None:
    """Of the steps of any rhythm about as many are chosen as of others."""
    chosen = [number for number in range(32 * 4096) if is_chosen(number, every)]
    share = sum(number % period == 0 for number in chosen) / len(chosen)
    assert share == pytest.approx(1 / period, rel=0.15)


def test_every_nth_is_just_that() -> None:
    """Whoever says n gets the multiples of n."""
    detail = Detail(8)
    assert [number for number in range(33) if detail.of_step(number)] == [0, 8, 16, 24, 32]
    assert detail.reason(0) == "sampled"


def test_auto_begins_with_the_first_ten() -> None:
    """Then it measures, on one step of each eight."""
    detail = Detail("auto")
    steps = [number for number in range(48) if detail.of_step(number)]
    assert steps[:10] == list(range(10))
    assert [number // 8 for number in steps[10:]] == [1, 2, 3, 4, 5]
    assert [detail.reason(number) for number in (0, 9, 10)] == ["first", "first", "sampled"]


def test_evaluations_stay_rare() -> None:
    """Nobody measures what their detail costs: one of 64, or fewer where even steps may have less."""
    detail = Detail("auto")
    detail.every = 2
    assert sum(detail.of_evaluation(number) for number in range(64, 64 * 9)) == 8
    detail.every = 128
    assert sum(detail.of_evaluation(number) for number in range(128, 128 * 5)) == 4
