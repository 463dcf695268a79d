"""`torchotel.testing`: what users check their own training with."""

import math
from typing import Any

import pytest
import torch
from support.recorded_training import rows, tree
from torch import Tensor, nn

import torchotel
from torchotel import _semconv as names
from torchotel._lifecycle import LIFECYCLE
from torchotel._records import Error, StepRecord
from torchotel._types import ConfigError
from torchotel.testing import capture


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.act(self.inner(x))
        return hidden


def train(model: nn.Module, steps: int) -> None:
    torchotel.instrument()  # as a program has it
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in rows(steps):
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torchotel.log(loss=loss)


def test_a_training_is_captured_as_it_is_exported_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    """Steps are trees of spans with their attributes, and the records that they are made of are there too."""
    with capture() as captured:
        train(Encoder(), steps=2)
        assert [step.attributes[names.STEP_NUMBER] for step in captured.steps] == [0, 1]
    first, second = captured.steps
    assert captured.steps[0] is first
    assert tree(second) == (
        "torch.step",
        [
            "torch.data",
            ("torch.forward", [("forward Encoder", ["forward inner", "forward act"])]),
            ("torch.backward", [("backward Encoder", ["backward act", "backward inner"])]),
            "torch.optimizer.step",
        ],
    )
    inner = first.find("forward inner")
    assert inner.parent is first.find("forward Encoder")
    assert inner.attributes[names.INPUT_SHAPES] == ("1x4",)
    assert inner.attributes[names.STEP_NUMBER] == 0
    assert first.start_ns <= inner.start_ns <= inner.end_ns <= first.end_ns
    assert 0 < inner.duration_s < first.duration_s
    units = [record for record in captured.records if isinstance(record, StepRecord)]
    assert [(unit.kind, unit.number, len(unit.calls)) for unit in units] == [("step", 0, 3), ("step", 1, 3)]
    assert captured.handle.stats()["spans_recorded"] == captured.handle.stats()["spans_exported"] > 0
    assert caplog.messages == []


def test_evaluations_and_failures() -> None:
    """A forward without training is an evaluation, and one that raises has its error."""

    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no such word")

    with capture(max_depth=0) as captured, torch.no_grad(), pytest.raises(ValueError, match="no such word"):
        Broken()(torch.ones(1))
    (evaluation,) = captured.evaluations
    call = evaluation.find("forward Broken")
    assert call.error is not None
    assert call.error == Error("ValueError", "no such word", "Broken")
    assert [event.name for event in call.events] == ["exception"]
    assert call.attributes["error.type"] == "ValueError"


def test_the_environment_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test does the same wherever it runs."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    monkeypatch.setenv("TORCHOTEL_DETAIL", "off")
    with capture() as captured:
        train(Encoder(), steps=1)
    (step,) = captured.steps
    assert step.find("forward inner").attributes[names.MODULE_TYPE] == "Linear"


def test_a_number_that_is_none_is_left_out() -> None:
    """As in every exporter; what went NaN is named instead."""
    with capture() as captured:
        model = Encoder()
        torch.nn.init.constant_(model.inner.weight, math.nan)
        train(model, steps=1)
    (step,) = captured.steps
    assert names.LOSS not in step.attributes
    assert step.attributes[names.NONFINITE] == ("loss",)


def test_a_span_that_is_not_there_is_told_with_those_that_are() -> None:
    """`find` wants one span, and says what it found."""
    with capture() as captured:
        train(Encoder(), steps=1)
    with pytest.raises(LookupError, match=r"0 spans 'forward decoder' below 'torch.step', where there are .*inner"):
        captured.steps[0].find("forward decoder")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("metrics_exporter", "prometheus"),
        ("endpoint", "http://localhost:1"),
        ("prometheus_port", 0),
        ("record", "run"),
        ("set_global_provider", True),
        ("discovery_dir", "targets"),
        ("headers", {"authorization": "secret"}),
    ],
)
def test_refuses_arguments_that_choose_an_exporter(name: str, value: Any) -> None:
    """Otherwise it would open a port or push metrics, or the argument would be ignored without a message."""
    with pytest.raises(ConfigError, match=rf"{name}: got .*: leave it out") as raised, capture(**{name: value}):
        pass
    assert "secret" not in str(raised.value)
    assert LIFECYCLE.session is None


def test_one_at_a_time() -> None:
    """A capture inside a run would see nothing of it, so it is refused."""
    with torchotel.instrument(traces_exporter="none"), pytest.raises(RuntimeError, match="runs already"), capture():
        pass
    with capture(), pytest.raises(RuntimeError, match="runs already"), capture():
        pass
