"""Test that steps, phases, evaluations and module names are the same with every loop."""

import pytest
from support.framework_loops.model_and_data import BATCHES, EPOCHS, VALIDATION_BATCHES, Setting
from support.framework_loops.step_structure import structure

from torchotel import _semconv as names
from torchotel.testing import Captured, capture

SETTINGS = [Setting(), Setting(accumulate=2, bf16=True), Setting(accumulate=BATCHES)]
SANITY_CHECKS = {"lightning": 2}
"""Batches of Lightning's validation before the first step."""
ATTRIBUTE = {"lightning": "net"}
"""Attribute by which a framework's own module holds the model."""


def trained(loop: str, setting: Setting, detail: str = "all") -> Captured:
    train = pytest.importorskip(f"support.framework_loops.{loop}_loop", reason=f"{loop} is missing").train
    with capture(detail=detail) as captured:
        train(setting)
    assert captured.handle.stats()["internal_errors"] == 0
    return captured


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("loop", ["accelerate", "trainer", "lightning"])
def test_a_frameworks_loop_has_the_structure_of_a_plain_one(loop: str, setting: Setting) -> None:
    """A framework's loop has the same steps, phases and module calls as the plain loop, and all fetches."""
    plain = structure(trained("plain", setting))
    found = structure(trained(loop, setting), ATTRIBUTE.get(loop, ""))
    sanity = SANITY_CHECKS.get(loop, 0)
    assert found == plain._replace(evaluations=plain.evaluations + plain.evaluations[:sanity])


@pytest.mark.parametrize("loop", ["accelerate", "trainer", "lightning"])
def test_without_module_spans_the_steps_and_phases_are_the_same(loop: str) -> None:
    """Steps and phases are the same without module hooks."""
    setting = Setting(accumulate=2)
    plain, found = structure(trained("plain", setting, "off")), structure(trained(loop, setting, "off"))
    assert found == plain
    assert [name for name, below in found.steps[0] if below] == []


def test_a_plain_loop_is_found_whole() -> None:
    """The plain loop is complete: each step has two pairs of forward and backward."""
    found = structure(trained("plain", Setting(accumulate=2, bf16=True)))
    assert len(found.steps) == EPOCHS * BATCHES // 2
    assert len(found.evaluations) == EPOCHS * VALIDATION_BATCHES
    assert found.fetches == EPOCHS * (1 + BATCHES)  # creating the iterator counts as one
    low = "('bfloat16',)"
    body = ((f"forward body.0 {low}", ()), (f"forward body.1 {low}", ()))
    forward = ("forward Net", (("forward body", body), (f"forward head {low}", ())))
    assert found.evaluations[0] == forward
    for number, step in enumerate(found.steps):
        pairs = [names.SPAN_FORWARD, names.SPAN_BACKWARD] * 2
        between = [names.SPAN_BETWEEN] if number else []
        assert [name for name, _ in step] == [*between, *pairs, names.SPAN_OPTIMIZER]
        assert [below for name, below in step if name == names.SPAN_FORWARD] == [(forward,)] * 2
