"""Test how summary and page report NaN: the step, the first layers, the values before."""

import math
import re
from pathlib import Path

import pytest
import torch
from support import report_runs
from support.recorded_runs import advice, recorded, train
from support.run_folders import step, write
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchotel
from torchotel.runs import StepValue, open_run, render, summarise
from torchotel.runs.html import document, gather

BAD = 30
TITLE = "NaN or infinity "


class SquareRoot(nn.Module):
    """A module with an infinite derivative at zero."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.sqrt()


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def _bad_batch(step: int) -> torch.Tensor:
    batch = torch.rand(4, 8)
    if step == BAD:
        batch[0, 0] = math.nan
    return batch


def test_a_bad_batch_is_found(tmp_path: Path) -> None:
    """A bad batch makes the loss NaN; gradient norms show the layers one step later."""
    content = recorded(tmp_path, lambda: train(_net(), 45, batch=_bad_batch), detail="off")
    value_ranges = content.summary.value_ranges
    onset = value_ranges.onset
    assert onset is not None
    assert (onset.kind, onset.number, onset.loss, onset.loss_here) == ("step", BAD, True, None)
    assert (onset.layers, onset.layers_step) == (["2", "0"], BAD + 1)
    assert onset.loss_before is not None
    assert onset.loss_before.step == BAD - 1
    assert value_ranges.values[0].last is None
    found = advice(content, TITLE)
    assert found is not None
    assert found.title.endswith(f"began at step {BAD}")
    assert f"Layers with such gradients at step {BAD + 1}: <b>2, 0</b>." in found.text
    assert f"a loss of {onset.loss_before}." in found.text
    assert f"The gradients of step {BAD - 1} were not read" in found.text
    assert f"Check the batches of steps {BAD - 1} and {BAD} first" in found.text
    assert 'href="#norms"' in found.text
    assert 'id="norms"' in document(content)
    assert "<dt>last loss</dt><dd>NaN or Inf</dd>" in report_runs.head(content)


def test_an_evaluation_is_named_with_the_step_before(tmp_path: Path) -> None:
    """A batch that the program skips before its backward is an evaluation. A negative loss that falls has not grown."""

    def program() -> None:
        net = _net()
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        for number, batch in enumerate(DataLoader(TensorDataset(torch.rand(40, 8)))):
            loss = net(batch[0] * math.nan if number == 20 else batch[0]).mean()
            torchotel.log(loss=loss)
            if loss.isfinite():
                loss.backward()
                optimizer.step()

    content = recorded(tmp_path, program, detail="off")
    found = advice(content, TITLE)
    assert found is not None
    assert found.title.endswith("began at evaluation 0, after step 19")
    assert "Check the batch of evaluation 0, after step 19 first" in found.text
    run = open_run(tmp_path / "run")
    text = render(summarise(run.records(), run.spans()), run.info)
    assert "NaN or infinite first at evaluation 0, after step 19\n" in text


def test_the_summary_says_so_too(tmp_path: Path) -> None:
    """The summary names the step before its tables, with the last finite gradient norm."""
    content = recorded(tmp_path, lambda: train(_net(), 45, batch=_bad_batch), detail="off", gradient_norms=True)
    text = render(content.summary, content.info)
    (lines,) = re.findall(rf"NaN or infinite first at step {BAD}\n((?:  .*\n)+)", text)
    assert re.fullmatch(
        rf"  first in      the loss\n"
        rf"  first layers  2, 0 \(gradients of step {BAD}\)\n"
        rf"  loss before   [\d.e-]+ at step {BAD - 1}\n"
        rf"  norm before   [\d.e-]+ at step {BAD - 1}, of all gradients\n",
        lines,
    )
    found = advice(content, TITLE)
    assert found is not None
    assert f"Check the batch of step {BAD} first" in found.text  # the previous step had finite gradients
    assert re.search(r"\nloss +[\d.e-]+ +NaN or Inf ", text)


def test_a_growing_loss_is_told_from_a_bad_batch(tmp_path: Path) -> None:
    """A learning rate that is too large lets the loss grow until it is infinite, which is not a bad batch."""
    content = recorded(tmp_path, lambda: train(nn.Linear(8, 1), 200, lr=5.0))
    found = advice(content, TITLE)
    assert found is not None
    assert "The loss had grown to" in found.text
    assert "lower the learning rate" in found.text
    assert "check the batch" not in found.text


def test_gradients_that_grow_before_the_loss_does_are_no_fault_of_the_backward(tmp_path: Path) -> None:
    """Gradients overflow while the loss is finite but many times its median; the backward is not blamed."""
    lines = [step(number, 0.1, values={"loss": 2.0}, gradient_norm=1.0) for number in range(20)]
    lines += [step(20, 0.1, values={"loss": 1e30}, gradient_norm=None, nonfinite=["gradient 0"])]
    found = advice(gather(open_run(write(tmp_path / "run", units=lines))), TITLE)
    assert found is not None
    assert "The loss had grown to" in found.text
    assert "backward made it" not in found.text


def test_without_a_loss_no_cause_is_named(tmp_path: Path) -> None:
    """Without a logged loss, NaN is seen on steps with gradient norms only, so it may have begun earlier."""
    lines = [step(number, 0.1) for number in range(8)]
    lines += [step(8, 0.1, gradient_norm=None, gradient_norms={"Net": {"0": None}}, nonfinite=["gradient 0"])]
    content = gather(open_run(write(tmp_path / "run", units=lines)))
    assert "first seen at step 8" in render(content.summary, {})
    assert "gradient norms were read on 1 of 9 steps" in " ".join(render(content.summary, {}).split())
    found = advice(content, TITLE)
    assert found is not None
    assert found.title.endswith("was first seen at step 8")
    assert "No loss was logged, and gradient norms were read on 1 of 9 steps; it may have begun" in found.text
    assert "backward made it" not in found.text


def test_a_page_without_nan_says_how_many_steps_were_checked(tmp_path: Path) -> None:
    """Without a logged loss, the page says that NaN on other steps is not shown."""
    lines = [step(number, 0.1, gradient_norm=1.0) if number < 2 else step(number, 0.1) for number in range(9)]
    content = gather(open_run(write(tmp_path / "run", info={"finished": True}, units=lines)))
    assert "gradient norms were read on 2 of 9 steps; a NaN on other steps is not shown." in report_runs.head(content)
    lines = [step(number, 0.1, values={"loss": 1.0}) for number in range(9)]
    content = gather(open_run(write(tmp_path / "logged", info={"finished": True}, units=lines)))
    assert "were read on" not in report_runs.head(content)


def test_a_backward_that_makes_the_first_nan_is_named(tmp_path: Path) -> None:
    """If the backward makes the first NaN, the layer below the square root is named; the loss is still finite."""
    model = nn.Sequential(nn.Linear(8, 4, bias=False), SquareRoot(), nn.Linear(4, 1))
    with torch.no_grad():
        next(model.parameters()).abs_()

    def batch(step: int) -> torch.Tensor:
        return torch.rand(4, 8) * (0.0 if step == 5 else 1.0)

    content = recorded(tmp_path, lambda: train(model, 7, lr=1e-4, batch=batch), detail="all")
    onset = content.summary.value_ranges.onset
    assert onset is not None
    assert (onset.number, onset.loss, onset.layers) == (5, False, ["0"])
    assert onset.loss_here is not None
    found = advice(content, TITLE)
    assert found is not None
    assert f"The loss of that step was finite ({onset.loss_here:.4g}), so the backward made it" in found.text


def test_finite_gradients_after_a_nan_loss_are_reported(tmp_path: Path) -> None:
    """If the program skips the backward of a NaN loss, the advice counts the later steps with finite gradients."""
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def program() -> None:
        for number in range(45):
            loss = model(_bad_batch(number)).pow(2).mean()
            torchotel.log(loss=loss)
            if loss.isfinite():
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    found = advice(recorded(tmp_path, program, detail="off"), TITLE)
    assert found is not None
    assert "The gradient norms read from then on (8 steps) are finite." in found.text
    assert "No gradient norm" not in found.text


def test_no_figure_is_named_that_shows_nothing(tmp_path: Path) -> None:
    """Without gradient norms, the advice names the setting instead of the figure."""
    content = recorded(tmp_path, lambda: train(_net(), 45, batch=_bad_batch), gradient_norms=False)
    found = advice(content, TITLE)
    assert found is not None
    assert "href" not in found.text
    assert "<code>gradient_norms=True</code> names the layers" in found.text


def test_a_loss_that_never_was_finite(tmp_path: Path) -> None:
    content = recorded(tmp_path, lambda: train(_net(), 3, loss=lambda _, output: output.mean() * math.nan))
    onset = content.summary.value_ranges.onset
    assert onset is not None
    assert (onset.number, onset.loss_before, onset.gradient_norm_before) == (0, None, None)
    found = advice(content, TITLE)
    assert found is not None
    assert "No loss before it was finite" in found.text
    assert "<dt>last loss</dt><dd>NaN or Inf</dd><dd class=note>never finite</dd>" in report_runs.head(content)


def test_a_loss_that_is_finite_again_is_shown(tmp_path: Path) -> None:
    """After one NaN, the tile shows the last finite loss, and the advice names the step."""

    def loss(step: int, output: torch.Tensor) -> torch.Tensor:
        return output.pow(2).mean() + (math.inf if step == 3 else 0.0)

    content = recorded(tmp_path, lambda: train(_net(), 6, loss=loss))
    value_ranges = content.summary.value_ranges
    assert value_ranges.onset is not None
    assert value_ranges.onset.number == 3
    assert value_ranges.nonfinite["loss"] == 1
    assert value_ranges.values[0].last is not None
    assert f"<dd>{value_ranges.values[0].last:.4g}</dd>" in report_runs.head(content)


def test_a_loss_that_is_logged_late_counts(tmp_path: Path) -> None:
    """A NaN that is logged after its step, as null in a line of its own, is found."""
    late = {"kind": "log", "number": 1, "time_unix_nano": "1", "values": {"loss": None}}
    run = open_run(write(tmp_path / "run", units=[step(0, 0.1, values={"loss": 2.0}), step(1, 0.1), late]))
    onset = summarise(run.records(), run.spans()).value_ranges.onset
    assert onset is not None
    assert (onset.kind, onset.number, onset.loss_before) == ("step", 1, StepValue(0, 2.0))


@pytest.mark.parametrize("detail", ["all", "off"])
def test_a_sound_run_has_none(tmp_path: Path, detail: str) -> None:
    content = recorded(tmp_path, lambda: train(_net(), 12), detail=detail, gradient_norms=True)
    assert content.summary.value_ranges.onset is None
    assert advice(content, TITLE) is None
    assert "NaN" not in render(content.summary, content.info)
