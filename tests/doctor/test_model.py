"""Test the doctor's check of a model: recorded modules, missing modules, and errors."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from torchotel.capture import torch_internals
from torchotel.config.config import Config
from torchotel.doctor import model
from torchotel.doctor.result import Finding, Level

MODELS = """
import torch
from torch import nn
import torchotel

handle = torchotel.instrument()  # as in many scripts

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.spare = nn.Linear(width, width)
        self.direct = nn.ReLU()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return {"hidden": (self.direct.forward(x),), "loss": x.sum()}

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(2, 3)

    def forward(self, words, weights):
        return self.embed(words) * weights

    @staticmethod
    def small():
        return Words(), {"words": torch.zeros(2, dtype=torch.int64), "weights": torch.ones(2, 3)}

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = [self.first]
        self.layers = [nn.Linear(4, 4), nn.ReLU()]
        self.heads = {"a": [(nn.Linear(4, 4),)]}
        self.teacher = [nn.Linear(4, 4).requires_grad_(False)]
        self.activations = [nn.ReLU(), nn.Tanh()]
        self.round = [3]
        self.round.append(self.round)

    def forward(self, x):
        return self.layers[0](self.first(x))

class Secretive(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    @property
    def training(self):
        raise LookupError("not telling")

    @training.setter
    def training(self, _):
        pass

class Losing(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return nn.L1Loss()(self.fc(x), x)

def net(): return Net()
def with_batch(): return Net(), torch.ones(2, 4)
def compiled(): return torch.compile(Net(), backend="eager")
def scripted(): return nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(4, 4))), nn.ReLU())
def nested(): return nn.Sequential(nn.Linear(4, 4), Plain())
def frozen(): return Net().requires_grad_(False)
def broken(): raise ValueError("no weights here")
def ends(): raise SystemExit("usage: train.py")
def wrong(): return 3
made = Net()
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "doctored.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "doctored", raising=False)


def tried(name: str, *inputs: tuple[tuple[int, ...], str], **settings: Any) -> list[Finding]:
    findings = list(model.check(Config(**settings), f"doctored:{name}", inputs))
    lacking = [seam for seam, there in torch_internals.found().items() if not there]
    return findings[:-1] if lacking else findings


ROW = ((2, 4), "float32")


@pytest.mark.parametrize(("name", "inputs"), [("net", (ROW,)), ("with_batch", ()), ("made", (ROW,)), ("Net", (ROW,))])
def test_counts_what_is_seen(name: str, inputs: tuple[Any, ...]) -> None:
    seen, unseen = tried(name, *inputs)
    assert (seen.level, unseen.level) == (Level.OK, Level.OK)
    assert seen.text == "Net: 7 modules, 4 called; a step has 8 module spans, 11 in all; max_spans is 2000"
    assert unseen.text == "2 not called: spare, direct"
    assert "their forward is called directly" in unseen.advice


@pytest.mark.parametrize(("name", "inputs"), [("Words.small", ()), ("Words", (((2,), "int64"), ((2, 3), "float64")))])
def test_takes_inputs_as_a_model_wants_them(name: str, inputs: tuple[Any, ...]) -> None:
    (seen,) = tried(name, *inputs)
    assert seen.text.startswith("Words: 2 modules, 2 called; a step has 4 module spans")


def test_counts_no_calls_of_other_modules() -> None:
    """A loss that is created in forward does not count as a module of the model."""
    (seen,) = tried("Losing", ROW)
    assert seen.text.startswith("Losing: 2 modules, 2 called; a step has 6 module spans")


def test_tells_that_calls_fold() -> None:
    seen, _ = tried("net", ROW, max_spans=10)
    assert seen.level is Level.WARNING
    assert "a step has 2 module spans, 5 in all; max_spans is 10" in seen.text
    assert seen.advice.startswith("6 deeper calls fold")


def test_counts_with_the_filters_that_are_set() -> None:
    seen, unseen = tried("net", ROW, include=("blocks.1",))
    assert "4 called; a step has 2 module spans" in seen.text
    assert unseen.text == "2 not called: spare, direct"


@pytest.mark.parametrize(("name", "text"), [("compiled", "torch.compile: Net"), ("scripted", "TorchScript: 0")])
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
def test_tells_regions_that_run_no_hooks(name: str, text: str) -> None:
    _, region = tried(name, ROW)
    assert (region.level, region.text) == (Level.OK, text)


def test_warns_of_layers_in_plain_lists() -> None:
    """Trainable modules in unregistered lists are reported, including those inside other modules."""
    _, found = tried("Plain", ROW)
    assert (found.level, found.text) == (
        Level.WARNING,
        "layers held in plain lists or dicts: Plain.layers, Plain.heads",
    )
    assert "nn.ModuleList" in found.advice
    _, found = tried("nested", ROW)
    assert found.text.endswith(": 1.layers, 1.heads")


def test_tells_that_nothing_goes_backward() -> None:
    found = tried("frozen", ROW)[0]
    assert found.level is Level.WARNING
    assert "frozen" in found.advice


@pytest.mark.parametrize(
    ("name", "inputs", "text"),
    [
        ("net", (((2, 5), "float32"),), "a step of Net failed: RuntimeError: "),
        ("net", (), "a step of Net failed: TypeError"),
        ("net", (((2, 4), "banana"),), "torch has no dtype banana"),
        ("broken", (), "could not be loaded: ValueError: no weights here ("),
        ("ends", (), "could not be loaded: SystemExit: usage: train.py ("),
        ("absent", (), "could not be loaded: AttributeError: module 'doctored' has no attribute 'absent'"),
        ("wrong", (), "doctored:wrong is of type int"),
    ],
)
def test_tells_what_is_wrong(name: str, inputs: tuple[Any, ...], text: str) -> None:
    (found,) = tried(name, *inputs)
    assert found.level is Level.FAILED
    assert text in found.text
    assert found.advice


def test_tells_an_error_of_our_own() -> None:
    """An error inside torchotel is reported: here a module whose `training` attribute raises."""
    found = tried("Secretive", ROW)[0]
    assert found.level is Level.FAILED
    assert "errors of torchotel in Secretive" in found.text


def test_keeps_the_session_of_a_script_out() -> None:
    tried("net", ROW)
    assert sys.modules["doctored"].handle.session is None
    assert not torch.nn.modules.module._global_forward_hooks
