"""What a program says of its steps: `log`."""

import json
import logging
import math
import subprocess
import sys
import threading
from collections import Counter
from enum import IntEnum, StrEnum
from pathlib import Path

import numpy as np
import pytest
import torch
from support.recorded_training import Run, recorded, rows
from support.small_training import Loop
from torch import nn

import torchotel
from torchotel.capture.logged_values import MAX_REST


def _lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_logged_values_are_attributes_of_their_step(tmp_path: Path) -> None:
    """Known ones by their own names, others as `torch.log.<name>`; counts add up and are no attributes."""
    loop = Loop()
    with recorded(record=tmp_path / "run") as run:
        for number in range(2):
            loss = loop.step()
            torchotel.log(loss=loss, lr=0.125, epoch=number, samples=2, tokens=np.int64(8))
            torchotel.log(samples=torch.tensor(3), accuracy=np.float32(0.5), phase="warm", warm=True)
    for number, step in enumerate(run.steps):
        assert {k: v for k, v in step.attributes.items() if k.startswith(("torch.l", "torch.epoch"))} == {
            "torch.loss": pytest.approx(step.attributes["torch.loss"]),
            "torch.learning_rate": 0.125,
            "torch.epoch": number,
            "torch.log.accuracy": 0.5,
            "torch.log.phase": "warm",
            "torch.log.warm": True,
        }
    values = [line["values"] for line in _lines(tmp_path / "run")]
    assert [(value["samples"], value["tokens"]) for value in values] == [(5, 8)] * 2  # type: ignore[index] # a dict
    assert run.steps[0].attributes["torch.loss"] > run.steps[1].attributes["torch.loss"]


def test_fractions_of_counts_add_up(tmp_path: Path) -> None:
    """A rank may log its share of a batch's tokens; a whole sum stays a whole number."""
    loop = Loop()
    with recorded(record=tmp_path / "run"):
        loop.step()
        torchotel.log(tokens=2.5, samples=torch.tensor(1.5))
        torchotel.log(tokens=np.float32(0.25), samples=torch.tensor(2.0))
        torchotel.log(epoch=2.75)
        loop.step()
        torchotel.log(tokens=2.0, samples=torch.tensor(4.0))
    values = [(line["values"]["tokens"], line["values"]["samples"]) for line in _lines(tmp_path / "run")]  # type: ignore[index] # a dict
    assert json.dumps(values) == "[[2.75, 3.5], [2, 4]]"


def test_blanks_around_a_name_do_not_count() -> None:
    """`"loss "` is the loss and no second series."""
    loop = Loop()
    with recorded() as run:
        loop.step()
        torchotel.log(**{" loss ": 0.5, "accuracy\n": 0.25, "top 5": 0.75})
    logged = {name: value for name, value in run.steps[0].attributes.items() if name.startswith("torch.lo")}
    assert logged == {"torch.loss": 0.5, "torch.log.accuracy": 0.25, "torch.log.top 5": 0.75}


def test_without_lr_it_is_the_optimizers() -> None:
    """Read at its step; a tensor too."""
    loop = Loop()
    with recorded() as run:
        loop.step()
        loop.optimizer.param_groups[0]["lr"] = torch.tensor(0.0625)
        loop.step()
    assert [step.attributes["torch.learning_rate"] for step in run.steps] == [0.03125, 0.0625]


class Gan:
    """A generator and a discriminator, each with its optimizer and learning rate."""

    def __init__(self) -> None:
        self.generator, self.discriminator = nn.Linear(2, 4), nn.Linear(4, 1)
        self.rates = 0.5, 0.25
        models = self.discriminator, self.generator
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=rate) for m, rate in zip(models, self.rates, strict=True)]

    def train(self, real: torch.Tensor, which: int) -> None:
        """Update the discriminator (0) or the generator (1)."""
        made = self.generator(torch.ones(len(real), 2))
        scores = [
            self.discriminator(batch).sigmoid().log().mean() for batch in ([real, made] if which == 0 else [made])
        ]
        self.optimizers[which].zero_grad()
        (-sum(scores)).backward()
        self.optimizers[which].step()


def learning_rates(run: Run) -> list[object]:
    return [step.attributes.get("torch.learning_rate") for step in run.steps]


def test_of_several_optimizers_the_first_has_the_learning_rate() -> None:
    """In one step, whichever steps last."""
    gan = Gan()
    with recorded() as run:
        for batch in rows(3):
            gan.train(batch, 0)
            gan.train(batch, 1)
    assert learning_rates(run) == [0.5] * 3


def test_steps_of_another_optimizer_alone_have_no_learning_rate() -> None:
    """Two rates in one series would read as a schedule."""
    gan = Gan()
    with recorded() as run:
        for number, batch in enumerate(rows(6)):
            gan.train(batch, int(number % 3 == 2))
    assert learning_rates(run) == [0.5, 0.5, None] * 2


def test_the_next_optimizer_has_the_learning_rate_once_the_first_is_gone() -> None:
    """A second training in the same program."""
    with recorded() as run:
        for rate in (0.5, 0.25):
            loop = Loop()
            loop.optimizer.param_groups[0]["lr"] = rate
            for batch in rows(2):
                loop.step(batch)
    assert learning_rates(run) == [0.5, 0.5, 0.25, 0.25]


def test_the_next_optimizer_has_the_learning_rate_once_the_first_has_rested() -> None:
    """The backbone is trained after the head, whose optimizer is still there."""
    head, backbone = Loop(), Loop()
    backbone.optimizer.param_groups[0]["lr"] = 0.25
    with recorded("off") as run:
        head.step()
        for batch in rows(MAX_REST + 2):
            backbone.step(batch)
        head.step()
    assert learning_rates(run) == [0.03125, *[None] * MAX_REST, 0.25, 0.25, None]


def test_each_thread_has_a_first_optimizer() -> None:
    """Two models that are trained side by side."""
    first, second = Loop(), Loop()
    second.optimizer.param_groups[0]["lr"] = 0.25
    with recorded() as run:
        first.step()
        other = threading.Thread(target=second.step)
        other.start()
        other.join()
        first.step()
    assert Counter(learning_rates(run)) == {0.03125: 2, 0.25: 1}


def test_a_value_is_read_as_it_was_when_it_was_logged() -> None:
    """The tensor may be overwritten right after."""
    loop = Loop()
    with recorded() as run:
        loop.step()
        value = torch.tensor(3.0)
        torchotel.log(loss=value)
        value.zero_()
    assert run.steps[0].attributes["torch.loss"] == 3.0


def test_the_last_value_of_a_name_counts() -> None:
    """Whether it was a tensor or a number, and also over a learning rate that the optimizer has as a tensor."""
    loop = Loop()
    loop.optimizer.param_groups[0]["lr"] = torch.tensor(0.0625)
    with recorded() as run:
        loop.step()
        torchotel.log(loss=torch.tensor(1.0), lr=0.5, samples=torch.tensor(2))
        torchotel.log(loss=2.0, samples=3)
        torchotel.log(samples=torch.tensor(4))
    step = run.steps[0].attributes
    assert (step["torch.loss"], step["torch.learning_rate"]) == (2.0, 0.5)


def test_after_the_loaders_end_a_value_goes_to_the_last_step() -> None:
    """It waits for a last word until something new opens."""
    loop = Loop()
    with recorded() as run:
        for batch in rows(2):
            loop.step(batch)
        torchotel.log(epoch=7)
    assert [step.attributes.get("torch.epoch") for step in run.steps] == [None, 7]


def test_a_value_of_a_step_that_is_gone_has_a_line_of_its_own(tmp_path: Path) -> None:
    """After the validation of an epoch, which has handed over the last training step."""
    loop = Loop()
    with recorded(record=tmp_path / "run"):
        for batch in rows(2):
            loop.step(batch)
        with torch.no_grad():
            for batch in rows(2):
                loop.model(batch)
        torchotel.log(accuracy=0.75)
    late = [line for line in _lines(tmp_path / "run") if line["kind"] == "log"]
    assert [(line["number"], line["values"]) for line in late] == [(1, {"accuracy": 0.75})]


def test_a_thread_that_trains_nothing_speaks_of_the_one_that_does() -> None:
    """A progress bar's thread, or an asynchronous logger."""
    loop = Loop()
    with recorded() as run:
        loop.step()
        other = threading.Thread(target=torchotel.log, kwargs={"seen": 3})
        other.start()
        other.join()
        loop.step()
    assert [step.attributes.get("torch.log.seen") for step in run.steps] == [3, None]


def test_what_cannot_be_logged_is_left_out_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is raised into the program."""
    loop = Loop()
    with recorded() as run:
        for _ in range(2):
            loop.step()
            torchotel.log(loss=torch.ones(3), lr="fast", epoch=math.nan, samples=-3, odd=object(), fine=1)
    assert run.steps[0].attributes["torch.log.fine"] == 1
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert [message.partition(" got ")[0] for message in warned] == [
        "log(loss=…)",
        "log(lr=…)",
        "log(epoch=…)",
        "log(samples=…)",
        "log(odd=…)",
    ]
    assert "a tensor of shape (3,) and torch.float32" in warned[0]
    assert "got -3; takes a number of at least 0" in warned[3]


class Stage(IntEnum):
    """Numbers of the program's own type."""

    WARM = 1


class Split(StrEnum):
    """Texts of the program's own type."""

    TRAIN = "train"


def test_members_of_enums_are_what_they_stand_for() -> None:
    """A number and a text."""
    loop = Loop()
    with recorded() as run:
        loop.step()
        torchotel.log(stage=Stage.WARM, split=Split.TRAIN, epoch=Stage.WARM)
    (step,) = run.steps
    logged = [step.attributes[f"torch.{name}"] for name in ("log.stage", "log.split", "epoch")]
    assert logged == [1, "train", 1]


def test_ever_new_names_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """Each is a series in Prometheus."""
    loop = Loop()
    with recorded() as run:
        loop.step()
        torchotel.log(**{f"name{number}": number for number in range(100)})
    assert len([name for name in run.steps[0].attributes if name.startswith("torch.log.")]) == 64
    assert len(caplog.records) == 1


def test_a_loss_that_is_not_a_number_is_named_and_its_step_kept() -> None:
    """It is no attribute: one NaN breaks Jaeger's search."""
    loop = Loop()
    with recorded("off") as run:
        loop.step()
        torchotel.log(loss=math.nan)
        loop.step()
    first, second = run.steps
    assert first.attributes["torch.nonfinite"] == ["loss"]
    assert first.attributes["torch.kept.reason"] == "nan"
    assert "torch.loss" not in first.attributes
    assert "torch.nonfinite" not in second.attributes


@pytest.mark.parametrize("bad", [math.inf, torch.tensor(math.nan)], ids=["number", "tensor"])
def test_a_loss_that_is_not_finite_outlasts_those_that_follow_in_its_step(bad: float | torch.Tensor) -> None:
    """A batch whose optimizer step the program leaves out for it is of one step with the next one."""
    loop = Loop()
    with recorded("off") as run:
        loop.step()
        loop.model(torch.ones(2, 4)).sum().backward()
        torchotel.log(loss=bad)
        for _ in range(2):
            loop.model(torch.ones(2, 4)).sum().backward()
            torchotel.log(loss=torch.tensor(1.0))
            torchotel.log(loss=0.5)
        loop.optimizer.step()
        loop.step()
    first, second, third = run.steps
    assert (second.attributes["torch.nonfinite"], second.attributes["torch.kept.reason"]) == (["loss"], "nan")
    assert not {"torch.nonfinite", "torch.loss"} & (first.attributes.keys() | third.attributes.keys())


@pytest.mark.program
def test_without_instrument_nothing_happens() -> None:
    """Neither torch is loaded nor anything done."""
    program = """
import sys, torchotel
torchotel.log(loss=1)
torchotel.watch(None, "x")
with torchotel.step(epoch=1):
    pass
assert "torch" not in sys.modules and "opentelemetry" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
