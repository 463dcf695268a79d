"""`suppress_instrumentation()`: what begins in its block is not recorded, and what begins after it is."""

import pytest
import torch
from opentelemetry import trace
from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, attach, detach, set_value
from opentelemetry.instrumentation.utils import suppress_instrumentation
from support.small_training import Loop

import torchotel
from torchotel.testing import capture


def test_steps_in_the_block_are_not_recorded() -> None:
    """No span, no metric; steps after the block are numbered from 0."""
    loop = Loop()
    with capture() as captured:
        with suppress_instrumentation():
            for _ in range(3):
                loop.step()
                torchotel.log(loss=1.0)
            with torchotel.step():
                loop.step()
        assert captured.handle.stats()["spans_recorded"] == 0
        loop.step()
        loop.step()
        steps = captured.steps
    assert [step.attributes["torch.step.number"] for step in steps] == [0, 1]
    assert all("torch.loss" not in step.attributes for step in steps)
    stats = captured.handle.stats()
    assert (stats["steps"], stats["evaluations"], stats["internal_errors"]) == (2, 0, 0)


@pytest.mark.parametrize("key", [_SUPPRESS_INSTRUMENTATION_KEY, "suppress_instrumentation"], ids=["random", "plain"])
def test_either_key_of_the_context_is_heeded(key: str) -> None:
    """The API has one, and opentelemetry-instrumentation sets both."""
    model = torch.nn.Linear(2, 2)
    with capture() as captured:
        token = attach(set_value(key, value=True))
        with torch.no_grad():
            model(torch.ones(1, 2))
        detach(token)
        assert captured.roots == []


def test_no_step_is_current_in_the_block() -> None:
    """A span that the program starts there by itself has no parent that is never sent."""
    seen = []

    class Asks(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(trace.get_current_span().get_span_context())
            return x

    with capture() as captured, suppress_instrumentation(), torch.no_grad():
        Asks()(torch.ones(1))
    assert [context.is_valid for context in seen] == [False]
    assert captured.handle.stats()["spans_recorded"] == 0
