"""Norms of gradients of every kind, against double precision."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fidelity.norms import true_norm
from support.gradient_norm_training import captured, gradient_norm, net, trained
from torch import Tensor, nn

from torchotel.capture.tensor_norms import combined, norms_async

ROOT = Path(__file__).parents[2]


def norms_of(*tensors: Tensor) -> list[float] | None:
    norms = norms_async(tensors)
    if norms is None:
        return None
    assert norms.ready()
    values = norms.values()
    assert values is not None
    assert None not in values
    return [value for value in values if value is not None]


def sparse(*, dtype: torch.dtype = torch.float32) -> Tensor:
    """Make a gradient of rows, one of them given three times."""
    rows = torch.arange(8.0).reshape(4, 2).to(dtype)
    return torch.sparse_coo_tensor(torch.tensor([[1, 0, 1, 1]]), rows, (5, 2), check_invariants=True)


KINDS = {
    "float32": torch.randn(33, 7),
    "float64": torch.randn(33, 7, dtype=torch.float64) * 1e200,
    "float16, too large to be squared": torch.full((100, 10), 60000.0).half(),
    "bfloat16": torch.full((1000, 1000), 1.0).bfloat16(),
    "complex": torch.randn(5, 3, dtype=torch.complex64),
    "scalar": torch.tensor(-3.0),
    "empty": torch.zeros(0, 4),
    "transposed": torch.randn(5, 9).t(),
    "expanded": torch.ones(1).expand(10),
    "sparse": sparse(),
    "sparse, coalesced": sparse().coalesce(),
    "sparse, empty": torch.zeros(5, 2).to_sparse(1),
    "sparse in two dimensions": torch.sparse_coo_tensor(
        torch.tensor([[0, 2, 0], [2, 0, 2]]), torch.tensor([3.0, 5.0, -4.0]), (3, 3), check_invariants=True
    ),
    "sparse, half": sparse(dtype=torch.float16),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_each_kind(kind: str) -> None:
    """The norm is right for every kind of gradient, and the tensor stays as it is."""
    tensor = KINDS[kind]
    version = tensor._version
    assert norms_of(tensor) == pytest.approx([true_norm([tensor])], rel=1e-6)
    assert tensor._version == version


def test_duplicates_stay_apart() -> None:
    """A sparse gradient that is not coalesced is not coalesced by being looked at."""
    tensor = sparse()
    assert norms_of(tensor) == pytest.approx([true_norm([tensor])])
    assert not tensor.is_coalesced()
    assert tensor._nnz() == 4


def test_all_kinds_at_once() -> None:
    """Types may be mixed; each norm is its own tensor's."""
    tensors = list(KINDS.values())
    assert norms_of(*tensors) == pytest.approx([true_norm([t]) for t in tensors], rel=1e-6)


@pytest.mark.parametrize(
    "layout",
    [lambda t: t, lambda t: t.reshape(4096, -1).t(), lambda t: t.reshape(2, 64, -1)[:, ::2], lambda t: t.bfloat16()],
    ids=["contiguous", "transposed", "strided", "bfloat16"],
)
def test_large_tensors(layout: object) -> None:
    """At 16 million elements the norm keeps four digits, where one float32 sum would lose them."""
    tensor = layout(torch.randn(1 << 24))  # type: ignore[operator]  # one of the functions above
    (norm,) = norms_of(tensor) or [0.0]
    assert norm == pytest.approx(true_norm([tensor]), rel=1e-4)
    if tensor.is_contiguous() and tensor.dtype is torch.float32:
        whole = torch.linalg.vector_norm(tensor).item()
        assert abs(whole / true_norm([tensor]) - 1) > 1e-4, "cutting is no longer needed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("values", ["all alike", "of one size"])
def test_large_tensors_of_like_numbers(dtype: torch.dtype, values: str) -> None:
    """Where all squares are alike the errors of a sum do not make up for each other: four digits hold there, too."""
    like = torch.full((1 << 24,), 0.3) if values == "all alike" else torch.randn(1 << 24).sign() * 1e-3
    tensor = like.to(dtype)
    assert norms_of(tensor) == pytest.approx([true_norm([tensor])], rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory", ["contiguous", "channels last", "with gaps", "overlapping", "a piece and one more"])
def test_every_element_of_a_large_tensor_counts(memory: str, dtype: torch.dtype) -> None:
    """However it lies in memory, and where its size is no multiple of a piece."""
    numbers = torch.randn(7, 50, 41, 23).to(dtype)
    tensor = {
        "contiguous": numbers,
        "channels last": numbers.contiguous(memory_format=torch.channels_last),
        "with gaps": numbers[:, ::2, 3:],
        "overlapping": numbers.flatten().unfold(0, 300, 7),
        "a piece and one more": numbers.flatten()[: (1 << 16) + 1],
    }[memory]
    assert norms_of(tensor) == pytest.approx([true_norm([tensor])], rel=1e-5)


def test_many_small_dimensions_are_cut() -> None:
    """Also where the largest dimension is small."""
    tensor = torch.randn([8] * 8)
    assert norms_of(tensor) == pytest.approx([true_norm([tensor])], rel=1e-4)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, device="meta"),
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.eye(3).to_sparse_csr(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ],
    ids=["meta", "float8", "compressed", "jagged", "nested"],
)
def test_what_has_no_norm(tensor: Tensor) -> None:
    """Its norm is left out, and those of others are known."""
    norms = norms_async([torch.ones(4), tensor])
    assert norms is not None
    assert norms.values() == [2.0, None]
    assert list(norms.left_out) == [1]
    assert norms_of(tensor) is None


class Compressed(nn.Linear):
    """A layer whose gradient is compressed by rows."""

    def __init__(self) -> None:
        super().__init__(2, 2, bias=False)
        self.weight = nn.Parameter(torch.eye(2).to_sparse_csr())

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.weight, x)  # type: ignore[no-any-return]  # torch has no types for it


def test_a_gradient_of_an_unknown_layout(caplog: pytest.LogCaptureFixture) -> None:
    """It is left out of the total and told of once; all others are there."""
    model = nn.Sequential(nn.Linear(2, 2), Compressed())
    with captured() as (seen, _):
        trained(model, loss=lambda m: m(torch.eye(2)).square().sum())
        true = gradient_norm(model[0])
    assert seen.paths == [["0"]] * 3
    assert seen.totals[-1] == pytest.approx(true, rel=1e-6)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "the norm of a gradient of Compressed `1` of Sequential can't be known (Tensor, torch.sparse_csr"
    )


def test_fake_tensors() -> None:
    """A fake tensor has no numbers to be read."""
    with torch._subclasses.FakeTensorMode():
        tensor = torch.ones(3)
    assert norms_of(tensor) is None


def test_transforms() -> None:
    """A gradient inside of vmap or grad is not a plain tensor."""
    seen: list[object] = []

    def look(x: Tensor) -> Tensor:
        seen.append(norms_async([x]))
        return x.sum()

    torch.func.vmap(look)(torch.ones(2, 3))
    torch.func.grad(look)(torch.ones(3))
    assert seen == [None, None]


def test_combining() -> None:
    """Parts are combined without overflow; what is not a number stays so, and infinity too."""
    assert combined([3e200, 4e200]) == pytest.approx(5e200)
    assert combined([float("inf"), 1.0]) == float("inf")
    assert str(combined([float("inf"), float("nan")])) == "nan"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_training_in_other_types(dtype: torch.dtype) -> None:
    """The model's type does not matter."""
    model = net(dtype=dtype)
    with captured() as (seen, _):
        true = trained(model, loss=lambda m: m(torch.ones(5, 4, dtype=dtype)).square().sum())
    assert seen.totals == pytest.approx(true, rel=1e-5)


def test_sparse_embedding() -> None:
    """The sparse gradient of an embedding counts with its duplicates summed."""
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    words = torch.tensor([1, 3, 1, 1, 7])
    with captured() as (seen, _):
        true = trained(model, loss=lambda m: m(words).square().sum())
    assert seen.totals == pytest.approx(true, rel=1e-6)
    assert seen.paths == [["0", "1"]] * 3


@pytest.mark.program
def test_sharded_gradients_count_what_is_here() -> None:
    """Of a DTensor the local shard counts, and no collective runs: the other rank never takes part."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SHARDED, str(ROOT)],
        check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    observed, local, collectives = json.loads(done.stdout.splitlines()[-1])
    assert observed == pytest.approx(local, rel=1e-6)
    assert collectives == 0


SHARDED = """
import json, sys
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torchotel.capture.tensor_norms import norms_async
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
mesh = init_device_mesh("cpu", (2,))
local = torch.arange(6.0)
gradient = DTensor.from_local(local, mesh, [Shard(0)])
with CommDebugMode() as collectives:
    norms = norms_async([gradient])
print(json.dumps([norms.values(), [local.norm().item()], collectives.get_total_counts()]))
"""


@pytest.mark.program
def test_without_the_private_parts() -> None:
    """Each tensor is asked by itself, with the same result; where a mode would see it, none is."""
    done = subprocess.run(
        [sys.executable, "-c", UNFUSED], check=True, capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    fused, single, seen_by_a_mode, after = json.loads(done.stdout)
    assert single == after == pytest.approx(fused, rel=1e-6)
    assert seen_by_a_mode == [True, []]


UNFUSED = """
import json
import torch
tensors = [torch.randn(3, 4), torch.full((100,), 60000.0).half(), torch.zeros(0)]
fused = [n.item() for t in tensors for n in torch._foreach_norm([t], 2, dtype=torch.float32)]
del torch._foreach_norm, torch._C._DisableTorchDispatch
from torch.utils.flop_counter import FlopCounterMode
from torchotel.capture.tensor_norms import norms_async
from torchotel.capture.async_readback import read_async
single = norms_async(tensors).values()
with FlopCounterMode(display=False):
    seen = [norms_async(tensors) is None, read_async([torch.ones(())]).values()]
print(json.dumps([fused, single, seen, norms_async(tensors).values()]))
"""


def test_gradients_of_a_model_are_what_torch_says() -> None:
    """The whole agrees with torch's own total norm."""
    model = net()
    with captured() as (seen, _):
        trained(model, steps=1)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert seen.totals == pytest.approx([torch.nn.utils.get_total_norm(gradients).item()], rel=1e-6)
    assert seen.totals == pytest.approx([gradient_norm(model)], rel=1e-6)
