"""One rank of two that trains a model in several wrappings, without torchotel and with it."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fidelity.counted import counting
from fidelity.forward_subjects import block, linear
from fidelity.layer_subjects import SIDE, Applied
from fidelity.subjects import loss_of
from fidelity.traces import faults
from torchotel.testing import capture


def rank_of_two(rank: int, folder: Path) -> None:
    """Check all wrappings; an assertion that fails ends the process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    for wrap in (_replicated, _statically, _sharded, _sharded_and_checkpointed):
        expected = _trained(wrap, rank)
        with capture(max_spans=None) as captured, counting() as counted:
            numbers = _trained(wrap, rank, counted.built)
        assert (wrap.__name__, faults(counted, captured)) == (wrap.__name__, [])
        assert len(captured.steps) == 3
        with capture(detail=2):  # with the hooks in and out
            in_turns = _trained(wrap, rank)
        assert all(map(torch.equal, numbers, expected)), wrap.__name__
        assert all(map(torch.equal, in_turns, expected)), wrap.__name__
    dist.destroy_process_group()


def _replicated(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def _statically(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, static_graph=True, gradient_as_bucket_view=True)


def _sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for child in model.children():
        fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _sharded_and_checkpointed(model: nn.Module) -> nn.Module:
    for name, child in model.named_children():
        model.add_module(name, Applied(lambda m, x: checkpoint(m.inner, x, use_reentrant=False), inner=child))
    return _sharded(model)


def _trained(
    wrap: Callable[[nn.Module], nn.Module], rank: int, built: Callable[[], object] = lambda: None
) -> list[Tensor]:
    """Train three steps, each rank on numbers of its own; give all that came of it here."""
    torch.manual_seed(0)
    model = wrap(nn.Sequential(linear(), block(), linear()))
    built()
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    numbers: list[Tensor] = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(model(torch.randn(4, SIDE)))
        loss.backward()
        optimizer.step()
        numbers += [loss.detach(), *(_here(p.grad) for p in model.parameters() if p.grad is not None)]
    return [*numbers, *(_here(parameter) for parameter in model.parameters())]


def _here(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()
