"""Test the names of DistributedDataParallel's buckets on a real process group of one rank."""

import json
from pathlib import Path
from typing import Any

import pytest
from support import commands
from support.needs import needs_group_hooks

pytestmark = [pytest.mark.program, needs_group_hooks]

PROGRAM = """
import json, sys, torch, torchotel.testing
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
        self.head, self.frozen = nn.Linear(64, 64), nn.Linear(64, 64).requires_grad_(False)
        self.body = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))

    def forward(self, x):
        return self.body(self.frozen(self.head(x * self.scale)))

def wrapped(net=None, **options):
    return DistributedDataParallel(net or Net(), bucket_cap_mb=0.01, **options)

def without_bias(net):
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["head.bias"])
    return net

def compressed():
    model = wrapped(nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(128, 32, bias=False)))
    model.register_comm_hook(None, fp16_compress_hook)
    return model

def frozen_later(model):
    model.module.head.requires_grad_(False)
    return model

def train(*models, steps=4, after_backward=lambda model: None):
    '''Return the modules of the collectives in the backwards of the last step, which averages its loss, too.'''
    parameters = [parameter for model in models for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    with torchotel.testing.capture(max_spans=None) as captured:
        for _ in range(steps):
            optimizer.zero_grad()
            for model in models:
                loss = model(torch.ones(2, 64)).square().mean()
                loss.backward()
                dist.all_reduce(loss.detach())
            optimizer.step()
    spans = [span for span in captured.steps[-1].walk() if span.name == "torch.collective all_reduce"]
    names = "torch.collective.bytes", "torch.collective.modules"
    return [[span.attributes.get(name) for name in names] for span in spans]
"""
WEIGHT_BYTES, BIAS_BYTES = 4 * 64 * 64, 4 * 64
LAYER_BYTES = WEIGHT_BYTES + BIAS_BYTES
LOSS = [4, None]


def said(expression: str, folder: Path) -> Any:
    path = folder / "program.py"
    path.write_text(f"{PROGRAM}\nprint(json.dumps({expression}))")
    done = commands.python(str(path), str(folder / "store"), cwd=folder, **commands.SILENT)
    assert done.returncode == 0, done.stderr
    assert "internal error" not in done.stderr
    return json.loads(done.stdout)


def test_a_bucket_names_its_modules(tmp_path: Path) -> None:
    """In the order of the backward, without the wrapper; the program's own collective has no modules."""
    assert said("train(wrapped())", tmp_path) == [
        [LAYER_BYTES, ["body.1"]],
        [LAYER_BYTES, ["body.0"]],
        [LAYER_BYTES, ["head"]],
        [BIAS_BYTES, ["Net"]],
        LOSS,
    ]


def test_a_model_inside_of_another_module_and_parameters_that_are_ignored(tmp_path: Path) -> None:
    """Paths begin at the outermost module, and one with parameters of its own has its path."""
    outer = (
        "[setattr(net := Net(), '_ddp_params_and_buffers_to_ignore', ['head.bias']), nn.Sequential(wrapped(net))][1]"
    )
    assert said(f"train({outer})", tmp_path) == [
        [LAYER_BYTES, ["0.body.1"]],
        [LAYER_BYTES, ["0.body.0"]],
        [WEIGHT_BYTES, ["0.head"]],
        [BIAS_BYTES, ["0"]],
        LOSS,
    ]


@pytest.mark.parametrize(
    "models",
    [
        pytest.param("wrapped(find_unused_parameters=True)", id="buckets that are not arranged by the backward"),
        pytest.param("compressed()", id="a compressed bucket that is as large as another one"),
        pytest.param("wrapped(), wrapped()", id="two models with equal buckets"),
        pytest.param(
            "frozen_later(wrapped(static_graph=True))", id="a layer that was frozen after the model was wrapped"
        ),
    ],
)
def test_no_modules_are_named_if_they_are_not_known(tmp_path: Path, models: str) -> None:
    assert not any(modules for _, modules in said(f"train({models})", tmp_path))
