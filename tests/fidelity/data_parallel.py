"""Trainings on replicated models: DistributedDataParallel with its options."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from fidelity.forward_subjects import linear
from fidelity.layer_subjects import SIDE, Applied
from fidelity.ranks import Built, RankTraining, numbers_of, plain_model
from fidelity.subjects import loss_of

Step = Callable[[DistributedDataParallel, Optimizer], Tensor]
"""Runs one training step; returns its loss."""


def data_parallel() -> Iterator[RankTraining]:
    """Yield all of them."""
    yield partial(_trained)
    small_buckets = partial(
        DistributedDataParallel, static_graph=True, gradient_as_bucket_view=True, bucket_cap_mb=0.0005
    )
    yield partial(_trained, wrap=small_buckets)
    yield partial(_trained, build=_with_unused, wrap=partial(DistributedDataParallel, find_unused_parameters=True))
    yield partial(_trained, prepare=_compress_to(default_hooks.fp16_compress_hook))
    yield partial(_trained, prepare=_compress_to(default_hooks.bf16_compress_hook))
    yield partial(_trained, prepare=_power_sgd)
    yield partial(_trained, optimizer_of=_zero_redundancy)
    yield partial(_trained, step=_accumulated)
    yield partial(_trained, step=_mixed)
    yield _joined


def _trained(
    rank: int,
    built: Built,
    *,
    build: Callable[[], nn.Module] = plain_model,
    wrap: Callable[[nn.Module], DistributedDataParallel] = DistributedDataParallel,
    prepare: Callable[[DistributedDataParallel], object] = lambda _: None,
    optimizer_of: Callable[[nn.Module], Optimizer] = lambda model: SGD(model.parameters(), 1e-2, momentum=0.9),
    step: Step | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Train on numbers of this rank."""
    torch.manual_seed(0)
    inner = build()
    model = wrap(inner)
    prepare(model)
    built(inner)
    torch.manual_seed(1 + rank)
    optimizer = optimizer_of(model)
    losses = [(step or _plain)(model, optimizer) for _ in range(3)]
    return losses, numbers_of(model)


def _plain(model: nn.Module, optimizer: Optimizer) -> Tensor:
    optimizer.zero_grad()
    loss = loss_of(model(torch.randn(4, SIDE)))
    loss.backward()
    optimizer.step()
    return loss.detach()


def _mixed(model: nn.Module, optimizer: Optimizer) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return _plain(model, optimizer)


def _accumulated(model: DistributedDataParallel, optimizer: Optimizer) -> Tensor:
    with model.no_sync():
        loss_of(model(torch.randn(4, SIDE))).backward()
    loss = loss_of(model(torch.randn(4, SIDE)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _with_unused() -> nn.Module:
    return Applied(lambda model, x: model.used(x), used=linear(), unused=linear())


def _compress_to(hook: Callable[..., object]) -> Callable[[DistributedDataParallel], object]:
    return lambda model: model.register_comm_hook(None, hook)


def _power_sgd(model: DistributedDataParallel) -> None:
    state = power_sgd.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1)
    model.register_comm_hook(state, power_sgd.powerSGD_hook)


def _zero_redundancy(model: nn.Module) -> Optimizer:
    return ZeroRedundancyOptimizer(model.parameters(), SGD, lr=1e-2, momentum=0.9)


def _joined(rank: int, built: Built) -> tuple[list[Tensor], list[Tensor]]:
    """Train on uneven inputs: the ranks that have none left take part in the collectives of others."""
    torch.manual_seed(0)
    inner = plain_model()
    model = DistributedDataParallel(inner)
    built(inner)
    optimizer = SGD(model.parameters(), 1e-2)
    with Join([model]):
        losses = [_plain(model, optimizer) for _ in range(3 + rank)]
    return losses, numbers_of(model)
