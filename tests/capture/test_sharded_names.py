"""The names of modules whose classes FSDP2 swaps."""

import json
from pathlib import Path

import pytest
from support import commands

pytestmark = pytest.mark.program

SHARDED = """
import json
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchotel.testing import capture

class FSDPish(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.first(x))

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
model = FSDPish()
fully_shard(model.first, mesh=mesh)
fully_shard(model, mesh=mesh)
assert type(model).__name__ == "FSDPFSDPish"
with capture(gradient_norms=True) as captured:
    model(torch.ones(2, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
(step,) = captured.steps
calls = [span.attributes for span in step.walk() if span.name.startswith("forward ")]
print(json.dumps([[call["torch." + key] for key in ("model", "module.path", "module.type")] for call in calls]))
print(json.dumps([info.path for info, _ in captured.records[0].gradients.modules]))
dist.destroy_process_group()
"""


def test_a_sharded_model_has_the_name_of_its_class(tmp_path: Path) -> None:
    """`fully_shard` swaps the classes of modules for `FSDP…`, which are left out of path, type and model."""
    done = commands.python("-c", SHARDED, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    calls, norms = map(json.loads, done.stdout.splitlines())
    assert calls == [
        ["FSDPish", "FSDPish", "FSDPish"], ["FSDPish", "first", "Linear"], ["FSDPish", "last", "Linear"],
    ]  # fmt: skip
    assert norms == ["first", "last"]
