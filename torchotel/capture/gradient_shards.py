"""Which gradients a rank counts, such that the squared norms of all ranks add up to those of the whole model.

A shard counts on its rank. A replicated gradient counts on the first rank that has it. Placements and process groups
tell this on each rank, so no collective is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, distributed
from torch.nn import Module, Parameter

from torchotel.capture.module_registry import modules_of
from torchotel.capture.torch_internals import replica_group, unseen

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


class _Mesh(NamedTuple):
    ranks: frozenset[int]
    coordinate: Sequence[int] | None
    """The rank's position in the mesh; None: the rank is outside."""


class GradientShards:
    """Find out whether parameters of a step's models are sharded, and which gradients count on other ranks.

    Args:
        pipeline_stages: The modules of pipeline stages, by `id()`.
    """

    def __init__(self, pipeline_stages: Mapping[int, Module]) -> None:
        self._pipeline_stages = pipeline_stages
        self.sharded = False
        """Whether a rank has only a part of the gradients."""
        self._meshes: dict[int, _Mesh] = {}
        self._ranks: set[int] = set()
        """Ranks that share the parameters of the models."""
        self._flat: list[Module] = []
        """FSDP1's modules, whose shards are ordinary tensors."""
        self._later_replicas: list[Module] = []
        """Modules whose parameters are replicated on an earlier rank."""
        self._looks: dict[type, Callable[[Any], None] | None] = {}

    def look(self, module: Module) -> None:
        """Take a module of the step's models into account."""
        self.sharded = self.sharded or id(module) in self._pipeline_stages
        kind = type(module)
        if kind not in self._looks:
            self._looks[kind] = self._look_for(kind)
        look = self._looks[kind]
        if look is not None:
            look(module)
        for parameter in module._parameters.values():
            if parameter is not None and type(parameter) is not Parameter and (placements := placements_of(parameter)):
                self._mesh_of(parameter)
                self.sharded = self.sharded or not all(one.is_replicate() for one in placements)

    def counted_elsewhere(self, gradients: Sequence[Tensor]) -> set[int]:
        """Return the positions of the gradients that count on another rank; none if nothing is sharded."""
        if not self.sharded:
            return set()
        replicated, flat = _gradients_below(self._later_replicas), _gradients_below(self._flat)
        rank = distributed.get_rank()
        first = min(self._ranks, default=rank)
        found = set()
        for position, gradient in enumerate(gradients):
            placements = placements_of(gradient)
            if id(gradient) in replicated:
                counts = False
            elif placements is not None:
                counts = _counts(self._mesh_of(gradient), placements, first)
            else:
                counts = id(gradient) in flat or first == rank
            if not counts:
                found.add(position)
        return found

    def _look_for(self, kind: type) -> Callable[[Any], None] | None:
        names = {base.__name__ for base in kind.__mro__}
        if "DistributedDataParallel" in names:
            return self._look_at_replica
        return self._look_at_flat if "FullyShardedDataParallel" in names else None

    def _look_at_replica(self, replica: Any) -> None:
        if distributed.get_rank(replica.process_group) != 0:
            self._later_replicas.append(replica)

    def _look_at_flat(self, flat: Any) -> None:
        if flat.sharding_strategy.name == "NO_SHARD":
            self._look_at_replica(flat)
            return
        self.sharded = True
        self._flat.append(flat)
        self._ranks.update(distributed.get_process_group_ranks(flat.process_group))
        replicas = replica_group(flat)
        if replicas is not None and distributed.get_rank(replicas) != 0:
            self._later_replicas.append(flat)

    def _mesh_of(self, tensor: Any) -> _Mesh:
        mesh: DeviceMesh = tensor.device_mesh
        found = self._meshes.get(id(mesh))
        if found is None:
            with unseen():
                ranks = frozenset(mesh.mesh.flatten().tolist())
            found = self._meshes[id(mesh)] = _Mesh(ranks, mesh.get_coordinate())
            self._ranks |= ranks
        return found


def placements_of(tensor: Tensor) -> Sequence[Placement] | None:
    """Return how a DTensor is placed on its mesh; None for another tensor."""
    return None if type(tensor) in {Tensor, Parameter} else getattr(tensor, "placements", None)


def is_partial(tensor: Tensor) -> bool:
    """Return whether a tensor has to be added to those of other ranks: its norm does not follow from theirs."""
    return any(placement.is_partial() for placement in placements_of(tensor) or ())


def _counts(mesh: _Mesh, placements: Sequence[Placement], first: int) -> bool:
    """Return whether a DTensor counts on this rank.

    A mesh without the first rank has a replica of what the mesh with the first rank has.
    """
    if mesh.coordinate is None or first not in mesh.ranks:
        return False
    return all(
        place == 0 or not placement.is_replicate() for place, placement in zip(mesh.coordinate, placements, strict=True)
    )


def _gradients_below(tops: Iterable[Module]) -> set[int]:
    """Return the `id()`s of all gradients of modules and those below them."""
    modules = {id(module): module for top in tops for module in modules_of(top)}
    return {
        id(parameter.grad)
        for module in modules.values()
        for parameter in module._parameters.values()
        if parameter is not None and parameter.is_leaf and parameter.grad is not None
    }
