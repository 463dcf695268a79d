"""The names of models: given by the program, else of their classes."""

from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from support.named_net import Net, backward_of
from support.recorded_training import Run, recorded
from torch import nn

import torchotel
from torchotel._limits import MAX_NAME


def models(run: Run) -> list[list[str]]:
    """Give the names of the models in each step, in order."""
    spans = [[span for span in root.walk() if "torch.model" in span.attributes] for root in run.steps]
    return [list(dict.fromkeys(str(span.attributes["torch.model"]) for span in one)) for one in spans]


def test_a_name_before_the_first_call_and_after() -> None:
    """The name is on the next spans; spans of the steps before keep the old one."""
    one, other = Net(), Net()
    with recorded() as run:
        torchotel.name(one, "generator")
        for net in (one, other):
            backward_of(net)
        torchotel.name(other, "critic")
        backward_of(other)
    assert models(run) == [["generator"], ["Net"], ["critic"]]


def test_metrics_have_the_name() -> None:
    """It is the label of module metrics."""
    model = Net()
    registry = CollectorRegistry()
    with recorded(gradient_norms=True, prometheus_registry=registry) as run:
        torchotel.name(model, "generator")
        backward_of(model)
        torch.optim.SGD(model.parameters(), 0.1).step()
        run.handle.flush()
        samples = [sample for family in registry.collect() for sample in family.samples]
    named = {sample.name for sample in samples if "generator" in sample.labels.values()}
    assert {"torch_module_calls_total", "torch_module_time_seconds_total", "torch_module_gradient_norm"} <= named


def test_a_name_that_is_taken() -> None:
    """The second model of a name gets `-2`; naming a model again frees its name."""
    one, other = Net(), nn.Linear(4, 4)
    with recorded() as run:
        torchotel.name(one, "twin")
        torchotel.name(other, "twin")
        backward_of(one)
        other(torch.ones(2, 4)).sum().backward()
        torchotel.name(one, "first")
        torchotel.name(other, "twin")
        backward_of(one)
        other(torch.ones(2, 4)).sum().backward()
    assert models(run) == [["twin"], ["twin-2"], ["first"], ["twin"]]


def test_a_long_name_is_cut() -> None:
    """A name that leaves the process is bounded."""
    model = Net()
    with recorded() as run:
        torchotel.name(model, "x" * 5000)
        backward_of(model)
    ((name,),) = models(run)
    assert len(name) == MAX_NAME


def test_a_wrapped_model() -> None:
    """The name holds with a wrapper and without."""
    model = Net()
    wrapped = torch.optim.swa_utils.AveragedModel(model)
    with recorded() as run:
        torchotel.name(wrapped, "mean")
        backward_of(wrapped)
        torchotel.name(wrapped.module, "average")
        backward_of(wrapped)
    assert models(run) == [["mean"], ["average"]]


@pytest.mark.parametrize(
    ("model", "name", "message"),
    [
        ("net", "generator", "name() takes a torch.nn.Module, got str: nothing is named"),
        (Net(), "", "name() takes a string that is not empty, got '': the model keeps its name"),
        (Net(), 3, "name() takes a string that is not empty, got 3: the model keeps its name"),
    ],
)
def test_what_cannot_be_named(caplog: pytest.LogCaptureFixture, model: Any, name: Any, message: str) -> None:
    """A wrong argument is warned of; the program goes on."""
    with recorded():
        torchotel.name(model, name)
    assert [record.message for record in caplog.records] == [message]


def test_a_part_cannot_be_named(caplog: pytest.LogCaptureFixture) -> None:
    """A part is named after the model that holds it."""
    model = Net()
    with recorded() as run:
        backward_of(model)
        torchotel.name(next(model.children()), "part")
        backward_of(model)
    assert models(run) == [["Net"], ["Net"]]
    assert [record.message for record in caplog.records] == [
        "name(…, 'part') got a part of a model: name the module that holds it"
    ]


def test_without_instrument_nothing_happens() -> None:
    """As with all that a program says of its training."""
    torchotel.name(Net(), "generator")
