"""Gradient norms of models that several ranks share: each rank exports its part, before clipping."""

import json
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from fidelity.norms import true_norm
from fidelity.tensor_parallel import WORDS, Words, split
from support.ranks import call_on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from torchotel._records import StepRecord
from torchotel.testing import capture

pytestmark = [
    pytest.mark.program,
    pytest.mark.filterwarnings("ignore"),
]

Norms = Mapping[str, float]
"""By the module's path; the total at `TOTAL`."""
TOTAL = "total"
BATCH = torch.arange(32).reshape(8, 4) % WORDS


class Shared(NamedTuple):
    """A way to share `Words` between ranks."""

    wrap: Callable[[nn.Module], Any]
    batches: int
    """How many parts the batch has."""
    clips: bool = True
    """Whether gradients are clipped, which PyTorch can't for tensors of several meshes."""
    scope: str = "shard"
    unknown: frozenset[str] = frozenset()
    """Modules whose norms no rank can know."""


def _mesh(*names: str) -> DeviceMesh:
    shape = {1: (dist.get_world_size(),), 2: (2, dist.get_world_size() // 2)}[len(names)]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _fsdp1(model: nn.Module, **options: Any) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


def _fsdp1_hybrid(model: nn.Module) -> nn.Module:
    mesh = _mesh("replicate", "shard")
    return _fsdp1(model, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD, use_orig_params=True)


def _fsdp2(model: nn.Module, *dimensions: str) -> nn.Module:
    fully_shard(model, mesh=_mesh(*(dimensions or ("data",))))
    return model


def _fsdp2_hybrid(model: nn.Module) -> nn.Module:
    return _fsdp2(model, "replicate", "shard")


def _split(model: nn.Module) -> nn.Module:
    split(model, init_device_mesh("cpu", (2,)), sequence=False)
    return model


def _split_with_sequence(model: nn.Module) -> nn.Module:
    split(model, init_device_mesh("cpu", (2,)), sequence=True)
    return model


def _split_and_fsdp2(model: nn.Module, *, sequence: bool = False) -> nn.Module:
    mesh = _mesh("data", "tensor")
    split(model, mesh["tensor"], sequence=sequence)
    fully_shard(model, mesh=mesh["data"])
    return model


def _split_with_sequence_and_fsdp2(model: nn.Module) -> nn.Module:
    return _split_and_fsdp2(model, sequence=True)


WAYS = {
    2: [
        Shared(DistributedDataParallel, 2, scope="all"),
        Shared(_fsdp1, 2),
        Shared(_fsdp2, 2),
        Shared(_fsdp2, 2, clips=False),
        Shared(_split, 1, clips=False),
        Shared(_split_with_sequence, 1, unknown=frozenset({"before", "after"})),
    ],
    4: [
        Shared(_fsdp1_hybrid, 4),
        Shared(_fsdp2_hybrid, 4),
        Shared(_split_and_fsdp2, 2, clips=False),
        Shared(_split_with_sequence_and_fsdp2, 2),
    ],
}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return Words()


def _loss(model: nn.Module, words: Tensor) -> Tensor:
    loss: Tensor = model(words).square().mean()
    return loss


def _clip(model: nn.Module) -> None:
    if isinstance(model, FullyShardedDataParallel):
        model.clip_grad_norm_(1e-3)
    else:
        clip_grad_norm_(model.parameters(), 1e-3)


def _norms(shared: Shared) -> Norms:
    """Return the norms that this rank exports for one step; none if an earlier rank counts all that it has."""
    model = shared.wrap(_model())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    part = BATCH.chunk(shared.batches)[dist.get_rank() * shared.batches // dist.get_world_size()]
    with capture(gradient_norms=True) as captured:
        _loss(model, part).backward()
        if shared.clips:
            _clip(model)
        optimizer.step()
    (norms,) = [one.gradients for one in captured.records if isinstance(one, StepRecord)]
    if norms is None:
        return {}
    assert norms.sharded == (shared.scope == "shard")
    return {TOTAL: norms.total, **{module.path: norm for module, norm in norms.modules}}


def _write_norms(rank: int, folder: Path) -> None:
    found = [_norms(shared) for shared in WAYS[dist.get_world_size()]]
    (folder / f"{rank}.json").write_text(json.dumps(found))


def _added(ranks: list[Norms]) -> Norms:
    paths = {path for norms in ranks for path in norms}
    return {path: math.hypot(*(norms[path] for norms in ranks if path in norms)) for path in paths}


def _true(unknown: Collection[str]) -> Norms:
    whole = _model()
    _loss(whole, BATCH).backward()
    known = {path: module for path, module in whole.named_children() if path not in unknown}
    norms = {path: true_norm(parameter.grad for parameter in module.parameters()) for path, module in known.items()}
    return {TOTAL: math.hypot(*norms.values()), **norms}


@pytest.mark.parametrize("ranks", [2, 4])
def test_squares_add_up_over_ranks(ranks: int, tmp_path: Path) -> None:
    """Over ranks the squared norms of shards add up to those of the whole model, and replicated ones are the whole."""
    call_on_ranks(_write_norms, ranks, tmp_path, tmp_path)
    of_ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    for shared, norms in zip(WAYS[ranks], zip(*of_ranks, strict=True), strict=True):
        true = _true(shared.unknown)
        for whole in norms if shared.scope == "all" else [_added([*norms])]:
            expected = {TOTAL: true[TOTAL]} if "Words" in whole else true  # one flat parameter has all numbers
            seen = {path: norm for path, norm in whole.items() if path != "Words"}
            assert seen == pytest.approx(expected, rel=1e-5), shared
