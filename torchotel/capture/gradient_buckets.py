"""Name the modules whose gradients a collective of DistributedDataParallel reduces."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, NamedTuple

from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel

from torchotel._limits import MAX_BUCKET_MODULES
from torchotel.capture.module_registry import class_of, unwrapped, walk
from torchotel.capture.torch_internals import bucket_layout, group_name

if TYPE_CHECKING:
    from torchotel._records import Phase
    from torchotel.capture.collectives import OpenCollective


class _Bucket(NamedTuple):
    size_bytes: int
    modules: tuple[str, ...]
    """The paths of the modules, in the order in which the backward reaches them."""


class GradientBuckets:
    """Find the models of DistributedDataParallel, and name the collectives of their buckets.

    The buckets are known from the second or third step on; with unused parameters, never. A bucket that a communication
    hook compresses has another size than its collective, which is then not named.
    """

    def __init__(self) -> None:
        self._replicas: dict[int, _Replica] = {}
        """By `id()` of the model."""

    def look(self, top: Module) -> None:
        """Find the models in a module and below it."""
        for module, path, *_ in walk(top, ""):
            if isinstance(module, DistributedDataParallel) and id(module) not in self._replicas:
                self._add(module, path)

    def name(self, collectives: Sequence[OpenCollective], phases: Sequence[Phase]) -> None:
        """Name the modules of each collective that reduces a bucket.

        Args:
            collectives: The collectives of a segment of a step, in the order of their starts.
            phases: The phases of the segment.
        """
        replicas = [(replica.group, replica.buckets()) for replica in list(self._replicas.values())]
        sizes = Counter((group, *[bucket.size_bytes for bucket in buckets]) for group, buckets in replicas)
        reduced = [one for one in collectives if one.operation == "all_reduce" and _in_backward(one.start_ns, phases)]
        for group, buckets in replicas:
            if buckets and sizes[(group, *[bucket.size_bytes for bucket in buckets])] == 1:  # else they look the same
                _name(buckets, [one for one in reduced if one.group.name == group])

    def _add(self, model: DistributedDataParallel, path: str) -> None:
        key = id(model)
        reference = weakref.ref(model, lambda _: self._replicas.pop(key, None))
        self._replicas[key] = _Replica(reference, path, group_name(model.process_group))


class _Replica:
    """A model of DistributedDataParallel.

    Args:
        reference: The model.
        path: Its path without wrappers; empty: it is the outermost module.
        group: The name of its process group.
    """

    def __init__(self, reference: weakref.ref[DistributedDataParallel], path: str, group: str) -> None:
        self._reference, self._path, self.group = reference, path, group
        self._buckets: Sequence[_Bucket] = ()

    def buckets(self) -> Sequence[_Bucket]:
        """Return the buckets in the order of their collectives; empty: they are not known."""
        model = self._reference()
        if self._buckets or model is None or (model.find_unused_parameters and not model.static_graph):
            return self._buckets  # with unused parameters, the buckets keep an order that is not recorded
        if layout := bucket_layout(model):
            self._buckets = self._read(model, layout)
        return self._buckets

    def _read(self, model: DistributedDataParallel, layout: Sequence[tuple[int, Sequence[int]]]) -> list[_Bucket]:
        """Return the buckets, or none if their sizes are not those of the parameters, as after a layer was frozen."""
        parameters = list(self._reduced_parameters(model))
        buckets = []
        for size_bytes, numbers in layout:
            owned = [parameters[number] for number in numbers if number < len(parameters)]
            if sum(parameter.nbytes for _, parameter in owned) != size_bytes:
                return []
            paths = list(dict.fromkeys(path for path, _ in owned))
            buckets.append(_Bucket(size_bytes, tuple(paths[:MAX_BUCKET_MODULES])))
        return buckets

    def _reduced_parameters(self, model: DistributedDataParallel) -> Iterator[tuple[str, Parameter]]:
        """Yield the parameters in the order of their numbers in DistributedDataParallel, with the path of the owner."""
        title, ignored = class_of(unwrapped(model)), model.parameters_to_ignore
        seen = {id(parameter) for name, parameter in model.module.named_parameters() if name in ignored}
        for module, path, *_ in walk(model.module, self._path):
            for parameter in module._parameters.values():
                if parameter is not None and parameter.requires_grad and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield path or title, parameter


def _name(buckets: Sequence[_Bucket], collectives: Sequence[OpenCollective]) -> None:
    """Name the collectives, which are in the order of the buckets; those of the program may be between them."""
    found: list[OpenCollective] = []
    for collective in collectives:
        if collective.size_bytes == buckets[len(found) % len(buckets)].size_bytes:
            found.append(collective)
    if len(found) % len(buckets) == 0:  # else a communication hook has made one as large as another bucket
        for collective, bucket in zip(found, cycle(buckets), strict=False):
            collective.modules = bucket.modules


def _in_backward(time_ns: int, phases: Sequence[Phase]) -> bool:
    return any(phase.kind == "backward" and phase.start_ns <= time_ns <= phase.end_ns for phase in phases)
