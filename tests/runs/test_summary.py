"""Test the numbers of a summary, and its text."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from support import recorded_runs
from support import run_folders as folders
from torch import Tensor, nn

import torchotel
from torchotel._utils.text import duration
from torchotel.runs import LayerTime, Summary, open_run, render, summarise
from torchotel.runs.html.module_figure import sectors
from torchotel.runs.summary import has_several_models, quantile

LAID_OUT = """\
run         run-1
model       Net, 3 modules, 1,200 parameters
steps       2, 1 of them in detail, 6.667 a second by the wall clock
evaluations 1, 50.00 ms in all

step time        mean       p50       p95   share
step         200.0 ms  200.0 ms  290.0 ms  100.0%
  data       20.00 ms  20.00 ms  29.00 ms   10.0%
  forward    60.00 ms  60.00 ms  87.00 ms   30.0%
  backward   80.00 ms  80.00 ms  116.0 ms   40.0%
  optimizer  20.00 ms  20.00 ms  29.00 ms   10.0%
  other      20.00 ms  20.00 ms  29.00 ms   10.0%

slowest layers, forward, in training steps
layer  type  calls      self  share     total      mean
conv   Conv      1  30.00 ms  75.0%  30.00 ms  30.00 ms
Net    Net       1  5.000 ms  12.5%  40.00 ms  40.00 ms
fc     Fc        1  5.000 ms  12.5%  5.000 ms  5.000 ms

slowest layers, backward, in training steps
layer  type  calls      self  share     total      mean
conv   Conv      1  30.00 ms  75.0%  30.00 ms  30.00 ms
fc     Fc        1  10.00 ms  25.0%  10.00 ms  10.00 ms
Net    Net       1         0   0.0%  40.00 ms  40.00 ms"""


def _summary(folder: Path) -> Summary:
    run = open_run(folder)
    return summarise(run.records(), run.spans())


def test_adds_up_steps_phases_and_layers(tmp_path: Path) -> None:
    summary = _summary(folders.net(tmp_path / "run"))
    assert (summary.steps, summary.evaluations, summary.detailed_steps, summary.errors) == (2, 1, 1, {})
    whole, data, *_ = summary.phases
    assert (whole.name, *whole[1:]) == ("step", *map(pytest.approx, (0.2, 0.2, 0.29, 1.0)))
    assert (data.name, *data[1:]) == ("data", *map(pytest.approx, (0.02, 0.02, 0.029, 0.1)))
    assert summary.forward == [
        LayerTime("Net", "conv", "Conv", 1, 0.03, 0.03, 0.03, 0.75, 0.03),
        LayerTime("Net", "Net", "Net", 1, 0.005, 0.04, 0.04, 0.125, 0.04, 2, is_root=True),
        LayerTime("Net", "fc", "Fc", 1, 0.005, 0.005, 0.005, 0.125, 0.005),
    ]
    assert summary.backward == [
        LayerTime("Net", "conv", "Conv", 1, 0.03, 0.03, 0.03, 0.75, 0.03),
        LayerTime("Net", "fc", "Fc", 1, 0.01, 0.01, 0.01, 0.25, 0.01),
        LayerTime("Net", "Net", "Net", 1, 0.0, 0.04, 0.04, 0.0, 0.04, 2, is_root=True),
    ]


def test_counts_folded_evaluations_as_what_they_stand_for(tmp_path: Path) -> None:
    """Of 25 forwards of a request ten are recorded individually, and one record counts for the others."""
    units = [folders.step(number, 0.05, kind="evaluation", folded=0) for number in range(10)]
    folders.write(tmp_path / "run", units=[*units, folders.step(10, 0.5, kind="evaluation", folded=15)])
    assert _summary(tmp_path / "run").evaluations == 25


def test_adds_up_the_time_of_folded_evaluations(tmp_path: Path) -> None:
    """The time of folded evaluations is their sum; the duration of their record includes the gaps."""
    units = [
        folders.step(0, 0.25, kind="evaluation"),
        folders.step(1, 60.0, kind="evaluation", folded=15, folded_s=1.5),
    ]
    summary = _summary(folders.write(tmp_path / "run", units=units))
    assert summary.evaluation_s == 1.75
    assert "evaluations 16, 1.750 s in all" in render(summary, {})


def test_layers_are_those_of_training_steps(tmp_path: Path) -> None:
    """Calls in evaluations count only if there was no step."""
    spans = [folders.module("fc", 1, 0, 0, 10), folders.module("fc", 2, 0, 0, 30, step=None)]
    units = [folders.step(0, 0.1), folders.step(0, 0.05, kind="evaluation")]
    segments = [[folders.request(spans)]]
    summary = _summary(folders.write(tmp_path / "run", units=units, segments=segments))
    assert [(layer.calls, layer.total_s) for layer in summary.forward] == [(1, 10e-9)]
    assert "slowest layers, forward, in training steps" in render(summary, {})
    summary = _summary(folders.write(tmp_path / "evaluated", units=units[1:], segments=segments))
    assert [(layer.calls, layer.total_s) for layer in summary.forward] == [(1, 30e-9)]
    assert "slowest layers, forward, in evaluations" in render(summary, {})


@pytest.mark.parametrize(("outer_step", "inner_step", "records"), [(0, None, ()), (None, 0, [folders.step(0, 0.1)])])
def test_a_call_of_a_step_around_a_call_of_an_evaluation(
    tmp_path: Path, outer_step: int | None, inner_step: int | None, records: Sequence[Mapping[str, object]]
) -> None:
    """In a foreign or damaged run file, only one of two nested calls may have the number of a step."""
    spans = [folders.module("Net", 1, 0, 0, 40, step=outer_step), folders.module("fc", 2, 1, 0, 10, step=inner_step)]
    summary = _summary(folders.write(tmp_path / "run", units=records, segments=[[folders.request(spans)]]))
    assert [(layer.path, layer.calls, layer.self_s) for layer in summary.forward] == [("fc", 1, 10e-9)]


def test_says_how_many_calls_were_folded(tmp_path: Path) -> None:
    """Folded calls of a phase are counted too, if no module has a span."""
    spans = [
        folders.span("torch.forward", 1, 0, 0, 10, **{"torch.step.number": 0, "torch.folded.calls": 4}),
        {**folders.module("fc", 2, 1, 0, 10)},
    ]
    spans[1]["attributes"].append(folders.attribute("torch.folded.calls", 1500))
    folder = folders.write(tmp_path / "run", units=[folders.step(0, 0.1)], segments=[[folders.request(spans)]])
    assert "left out    1,504 module calls beyond max_spans" in render(_summary(folder), {})


def test_needs_no_order_of_spans(tmp_path: Path) -> None:
    run = open_run(folders.net(tmp_path / "run"))
    spans = list(run.spans())
    ordered = summarise(run.records(), spans)
    assert summarise(run.records(), spans[::-1]) == ordered
    assert summarise(run.records(), spans[3:] + spans[:3]) == ordered


def test_keeps_models_and_their_layers_apart(tmp_path: Path) -> None:
    spans = [folders.module("fc", 1, 0, 0, 10), folders.module("fc", 2, 0, 0, 30, model="Net-2")]
    folder = folders.write(tmp_path / "run", units=[folders.step(0, 0.1)], segments=[[folders.request(spans)]])
    layers = _summary(folder).forward
    assert [(layer.model, layer.path, layer.total_s) for layer in layers] == [
        ("Net-2", "fc", 30e-9),
        ("Net", "fc", 10e-9),
    ]
    assert "Net-2: fc" in render(_summary(folder), {})


class Encoder(nn.Linear):
    """A module whose attribute name is its class name."""


class Net(nn.Module):
    """A model that creates its loss in forward, and has an attribute named like its class."""

    def __init__(self) -> None:
        super().__init__()
        self.Encoder = Encoder(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = nn.CrossEntropyLoss()(self.Encoder(x), torch.zeros(4, dtype=torch.long))
        return loss


@pytest.mark.parametrize("name", [None, "mine"])
def test_only_the_model_itself_has_its_name(tmp_path: Path, name: str | None) -> None:
    """Only the model is shown by its model name, not a loss created in forward or an attribute named like a class."""

    def program() -> None:
        model = Net()
        if name is not None:
            torchotel.name(model, name)
        recorded_runs.train(model, 6)

    content = recorded_runs.recorded(tmp_path / "run", program, detail="all")
    for layers in (content.summary.forward, content.summary.backward):
        names = {layer.path: layer.name(several=has_several_models(layers)) for layer in layers}
        assert names == {"Net": name or "Net", "Encoder": "Encoder", "CrossEntropyLoss": "CrossEntropyLoss"}
        inside = {one.parent for one in sectors(layers, 500) if one.label in {"Encoder", "CrossEntropyLoss"}}
        assert inside == {one.id for one in sectors(layers, 500) if one.label == (name or "Net")}


def test_counts_errors_by_type(tmp_path: Path) -> None:
    error = {"type": "ValueError", "message": "no"}
    units = [
        folders.step(0, 0.1, error=error),
        folders.step(1, 0.1),
        folders.step(0, 0.1, kind="evaluation", error=error),
    ]
    summary = _summary(folders.write(tmp_path / "run", units=units))
    assert summary.errors == {"ValueError": 2}
    text = render(summary, {"error": error})
    assert "errors      2 ValueError\nended with  ValueError at evaluation 0, after step 1\n            no\n" in text


def test_counts_further_models(tmp_path: Path) -> None:
    with torchotel.instrument(record=tmp_path / "run", traces_exporter="none", prometheus_port=None, detail="all"):
        models = nn.Linear(4, 2), nn.Sequential(nn.Linear(4, 2))
        sum(model(torch.ones(4)).sum() for model in models).backward()
    run = open_run(tmp_path / "run")
    assert "parameters, and 1 more\n" in render(summarise(run.records(), run.spans()), run.info)


def test_lays_out_aligned_columns(tmp_path: Path) -> None:
    folder = folders.net(tmp_path / "run")
    assert render(_summary(folder), open_run(folder).info) == LAID_OUT


def test_shows_as_many_layers_as_asked(tmp_path: Path) -> None:
    summary = _summary(folders.net(tmp_path / "run"))
    assert render(summary, {}, top=1).count("conv") == 2
    assert "fc" not in render(summary, {}, top=1)


def test_says_what_is_missing(tmp_path: Path) -> None:
    units = [folders.step(0, 0.1, detailed=False)]
    info = {"finished": False, "recording": {"spans_deleted": 1200}, "model": None}
    text = render(_summary(folders.write(tmp_path / "run", units=units)), info)
    assert "no step was recorded in detail" in text
    assert "has not ended, or was cut short" in text
    assert "1,200 of the oldest spans" in text


def test_a_failed_run_has_ended(tmp_path: Path) -> None:
    """A run whose failure is known is not said to go on."""
    summary = _summary(folders.write(tmp_path / "run", units=[folders.step(0, 0.1, detailed=False)]))
    text = render(summary, {"finished": False, "error": {"type": "process_ended", "message": "killed"}})
    assert "process_ended after step 0" in text
    assert "has not ended" not in text


def test_summarises_an_empty_run(tmp_path: Path) -> None:
    summary = _summary(folders.write(tmp_path / "run", info={}))
    assert (summary.steps, summary.phases, summary.forward) == (0, (), [])
    assert render(summary, {}) == "steps       0\nevaluations 0"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0"), (1.5e-6, "1.500 µs"), (0.0123456, "12.35 ms"), (2, "2.000 s"), (0.99999, "1000 ms"), (3605, "3,605 s")],
)
def test_writes_a_duration_in_the_unit_that_suits_it(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_reads_quantiles_between_numbers() -> None:
    assert quantile([1.0], 0.95) == 1.0
    assert quantile([0.0, 10.0], 0.25) == 2.5
