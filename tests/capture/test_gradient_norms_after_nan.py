"""Gradient norms are taken after a loss that is not finite, on steps that have none otherwise, and not for long."""

import math
from typing import Any

import pytest
import torch
from support.gradient_norm_training import captured, loss_of, net

from torchotel.capture.gradient_norms import STEPS_AFTER_LOSS, STEPS_BETWEEN_LOOKS

FIRST_BAD = 3


def looked_at(
    steps: int, bad: Any, *, late: bool = False, gradient_norms: Any = "auto", detail: Any = "off"
) -> list[int]:
    """Train, with a loss that is not finite in the steps of `bad`; return the steps with norms."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with captured(gradient_norms=gradient_norms, detail=detail) as (seen, capture):
        for step in range(steps):
            optimizer.zero_grad()
            loss = loss_of(model) * (math.inf if step in bad else 1.0)
            loss.backward()
            optimizer.step()
            if late:
                capture.flush()
            capture.log({"loss": loss})
    return [step.number for step in seen.steps if step.gradients is not None]


@pytest.mark.parametrize("late", [False, True])
def test_the_next_steps_are_looked_at(late: bool) -> None:  # noqa: FBT001  # a parameter of the test
    """From the step on that follows, also if the loss is logged when its step has been handed over."""
    assert looked_at(20, {FIRST_BAD}, late=late) == list(range(FIRST_BAD + 1, FIRST_BAD + 1 + STEPS_AFTER_LOSS))


def test_the_first_layers_are_known() -> None:
    """Where every loss is NaN from some step on, the norms of the following steps name the layers."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with captured(gradient_norms="auto", detail="off") as (seen, capture):
        for step in range(5):
            optimizer.zero_grad()
            loss = loss_of(model) * (math.nan if step == 1 else 1.0)
            loss.backward()
            optimizer.step()
            capture.log({"loss": loss})
    assert [norms is not None for norms in seen.norms] == [False, False, True, True, True]
    assert seen.paths[2] == ["0", "2"]
    assert seen.norms[2] is not None
    assert all(math.isnan(norm) for _, norm in seen.norms[2].modules)


def test_what_it_costs_is_bounded() -> None:
    """While the loss stays bad, and where it is bad now and then, few steps of many are looked at."""
    first = list(range(FIRST_BAD + 1, FIRST_BAD + 1 + STEPS_AFTER_LOSS))
    steps = FIRST_BAD + 1 + STEPS_BETWEEN_LOOKS
    assert looked_at(steps, range(FIRST_BAD, steps)) == first
    assert looked_at(steps, range(FIRST_BAD, steps, 7)) == first
    again = looked_at(steps + 2 * STEPS_AFTER_LOSS, range(FIRST_BAD, 1000))
    assert again == first + [number + STEPS_BETWEEN_LOOKS for number in first]


@pytest.mark.parametrize(
    ("gradient_norms", "detail", "expected"),
    [
        (False, "all", []),
        (4, "off", [0, 4, 5, 6, 7, 8, 9, 10, 11, 12, 16]),
        ("auto", 9, [0, 4, 5, 6, 7, 8, 9, 10, 11, 18]),
    ],
)
def test_with_other_settings(gradient_norms: Any, detail: Any, expected: list[int]) -> None:
    """They come on top of those that the setting asks for; with False there are none."""
    assert looked_at(20, {FIRST_BAD}, gradient_norms=gradient_norms, detail=detail) == expected


def test_a_finite_loss_changes_nothing() -> None:
    """Norms are taken where the setting says."""
    assert looked_at(10, ()) == []
