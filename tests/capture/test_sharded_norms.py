"""Gradient norms of sharded models: of a rank's shard, before clipping."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fidelity.norms import true_norm
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn.utils import clip_grad_norm_

from torchotel._records import StepRecord
from torchotel.testing import capture

pytestmark = pytest.mark.program

ROWS = torch.linspace(-1, 1, 64).reshape(8, 8)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def _loss(model: nn.Module, rows: Tensor) -> Tensor:
    return model(rows).square().sum()  # type: ignore[no-any-return]  # a module call is Any


def _fsdp1() -> nn.Module:
    return FullyShardedDataParallel(_model(), device_id=torch.device("cpu"))


def _fsdp2() -> nn.Module:
    model = _model()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model


def _clip(model: nn.Module) -> None:
    if isinstance(model, FullyShardedDataParallel):
        model.clip_grad_norm_(1e-3)
    else:
        clip_grad_norm_(model.parameters(), 1e-3)


def _rank_of_two(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", store=FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    for make in (_fsdp1, _fsdp2):
        for clips in (False, True):
            model = make()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            with capture(gradient_norms=True) as captured:
                _loss(model, ROWS[4 * rank : 4 * rank + 4]).backward()
                if clips:
                    _clip(model)
                optimizer.step()
            (norm,) = [one.gradients.total for one in captured.records if isinstance(one, StepRecord) and one.gradients]
            (folder / f"{make.__name__} {clips} {rank}").write_text(str(norm))
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_squares_add_up_over_ranks(tmp_path: Path) -> None:
    """Over ranks the squares of what each says add up to that of the whole, whose clipping comes after."""
    spawn(_rank_of_two, (tmp_path,), nprocs=2)
    whole = _model()
    (_loss(whole, ROWS) / 2).backward()
    true = true_norm(parameter.grad for parameter in whole.parameters())
    for kind in ("_fsdp1", "_fsdp2"):
        for clips in (False, True):
            shards = [float((tmp_path / f"{kind} {clips} {rank}").read_text()) for rank in range(2)]
            assert math.hypot(*shards) == pytest.approx(true, rel=1e-5), (kind, clips)
            assert max(shards) < true
