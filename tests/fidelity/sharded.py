"""Trainings on sharded models: FullyShardedDataParallel and `fully_shard`, with their options."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import SGD, Optimizer

from fidelity.layer_subjects import SIDE
from fidelity.ranks import Built, RankTraining, numbers_of, plain_model
from fidelity.subjects import loss_of

Wrap = Callable[[nn.Module], Any]
Step = Callable[[nn.Module, Optimizer], Tensor]
"""Runs one training step; returns its loss."""
HALF = torch.bfloat16
WHOLE = MixedPrecisionPolicy()


def sharded() -> Iterator[RankTraining]:
    """Yield all of them."""
    first = partial(FullyShardedDataParallel, device_id=torch.device("cpu"))
    each = partial(first, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True)
    mixed = MixedPrecision(param_dtype=HALF, reduce_dtype=HALF)
    for wrap in (first, each, partial(each, mixed_precision=mixed), partial(_checkpointed, wrap=each)):
        yield partial(_trained, wrap=wrap)
    yield partial(_trained, wrap=each, step=_accumulated_unsynchronised)
    half = MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=torch.float32)
    for again in (_fully, partial(_fully, policy=half), partial(_checkpointed, wrap=_fully), _replicated_and_fully):
        yield partial(_trained, wrap=again)
    yield partial(_trained, wrap=_fully, step=_accumulated)


def sharded_and_compiled() -> Iterator[RankTraining]:
    """Yield those of models whose parts, or which as a whole, are compiled."""
    for wrap in (_compiled_parts, _compiled_whole):
        yield partial(_trained, wrap=wrap)


def _compiled_parts(model: nn.Module) -> FSDPModule:
    for child in model.children():
        child.compile(backend="aot_eager")
    return _fully(model)


def _compiled_whole(model: nn.Module) -> Any:
    _fully(model)
    return torch.compile(model, backend="aot_eager")


def _fully(model: nn.Module, shape: tuple[int, ...] = (2,), policy: MixedPrecisionPolicy = WHOLE) -> FSDPModule:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for child in model.children():
        fully_shard(child, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def _replicated_and_fully(model: nn.Module) -> FSDPModule:
    return _fully(model, (2, 1))


def _checkpointed(model: nn.Module, wrap: Wrap) -> Any:
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Sequential | nn.Linear))
    return wrap(model)


def _trained(rank: int, built: Built, *, wrap: Wrap, step: Step | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """Train on numbers of this rank."""
    torch.manual_seed(0)
    model = wrap(plain_model())
    built(plain_model())
    torch.manual_seed(1 + rank)
    optimizer = SGD(model.parameters(), 1e-2, momentum=0.9)
    losses = [(step or _plain)(model, optimizer) for _ in range(3)]
    return losses, numbers_of(model)


def _plain(model: nn.Module, optimizer: Optimizer) -> Tensor:
    loss = loss_of(model(torch.randn(4, SIDE)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _accumulated(model: nn.Module, optimizer: Optimizer) -> Tensor:
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    loss_of(model(torch.randn(4, SIDE))).backward()
    model.set_requires_gradient_sync(True)
    return _plain(model, optimizer)


def _accumulated_unsynchronised(model: nn.Module, optimizer: Optimizer) -> Tensor:
    assert isinstance(model, FullyShardedDataParallel)
    with model.no_sync():
        loss_of(model(torch.randn(4, SIDE))).backward()
    return _plain(model, optimizer)
