"""Name the modules whose gradients a collective of DistributedDataParallel reduces."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel

from torchotel._limits import MAX_BUCKET_MODULES
from torchotel._utils.faults import Guard
from torchotel.capture.module_registry import class_of, unwrapped, walk
from torchotel.capture.torch_internals import GROUPS_HAVE_HOOKS, bucket_layout

if TYPE_CHECKING:
    from torchotel._records import Phase
    from torchotel.capture.collectives import OpenCollective

MAX_READS = 16
"""Forwards in which the buckets of a model are looked for: DistributedDataParallel arranges them in the first few."""


class _Bucket(NamedTuple):
    size_bytes: int
    modules: tuple[str, ...]
    """The paths of the first modules, in the order in which the backward reaches them."""


class _Model:
    """What is known of a model of DistributedDataParallel."""

    __slots__ = ("buckets", "group", "reads")

    def __init__(self, model: DistributedDataParallel) -> None:
        self.group = weakref.ref(model.process_group)
        self.buckets: Sequence[_Bucket] = ()
        """In the order of their collectives; empty: not known."""
        self.reads = 0


class GradientBuckets:
    """Read the buckets of models of DistributedDataParallel, and name the collectives that reduce them.

    A name is left out rather than guessed: the collectives of a backward are named if they are the buckets of exactly
    one model, all of them and nothing else, and if the buckets of all models of the process group are known.
    """

    def __init__(self) -> None:
        self._models: weakref.WeakKeyDictionary[DistributedDataParallel, _Model] = weakref.WeakKeyDictionary()
        self._guard = Guard("the names of gradient buckets", off=self._switch_off)
        self._is_on = GROUPS_HAVE_HOOKS
        self._guarded_read, self._guarded_name = self._guard.guarded(self._read), self._guard.guarded(self._name)

    def forward_begins(self, model: Module) -> None:
        """Read the buckets of a model until they are known.

        Called at the start of a forward with gradients, outside of a backward. The reducer's lock is taken here, as
        the forward itself does next. Anywhere else, the thread may have this lock, which cannot be taken twice: a
        handler of a signal may run in a communication hook.
        """
        if self._is_on and isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync:
            self._guarded_read(model)

    def name(self, collectives: Sequence[OpenCollective], phases: Sequence[Phase]) -> None:
        """Name the modules of the collectives that reduce buckets.

        Args:
            collectives: The collectives of a segment of a step, in the order of their starts.
            phases: The phases of the segment.
        """
        if self._is_on and self._models and collectives:
            self._guarded_name([one for one in collectives if one.operation == "all_reduce"], phases)

    def _switch_off(self) -> None:
        self._is_on = False

    def _read(self, model: DistributedDataParallel) -> None:
        known = self._models.get(model)
        if known is None:
            known = self._models[model] = _Model(model)
        if not known.buckets and known.reads < MAX_READS:
            known.reads += 1
            if layout := bucket_layout(model):
                known.buckets, known.reads = _buckets(model, layout), MAX_READS

    def _name(self, reduced: Sequence[OpenCollective], phases: Sequence[Phase]) -> None:
        models = list(self._models.values())
        for phase in phases:
            if phase.kind != "backward":
                continue
            of_phase = [one for one in reduced if phase.start_ns <= one.start_ns <= phase.end_ns]
            for group in {one.group for one in of_phase}:
                _name_backward(
                    [known for known in models if known.group == group.reference],
                    [one for one in of_phase if one.group is group],
                )


def _name_backward(models: Sequence[_Model], collectives: Sequence[OpenCollective]) -> None:
    """Name the collectives of one process group in one backward."""
    sizes = [collective.size_bytes for collective in collectives]
    found = [known.buckets for known in models if [bucket.size_bytes for bucket in known.buckets] == sizes]
    if len(found) == 1 and all(known.buckets for known in models):
        for collective, bucket in zip(collectives, found[0], strict=True):
            collective.modules = bucket.modules


def _buckets(model: DistributedDataParallel, layout: Sequence[tuple[int, Sequence[int]]]) -> Sequence[_Bucket]:
    """Return the buckets; none if the parameters are not those that the reducer has, as after a layer was frozen."""
    parameters = list(_reduced_parameters(model))
    if sorted(number for _, numbers in layout for number in numbers) != [*range(len(parameters))]:
        return ()
    buckets = []
    for size_bytes, numbers in layout:
        owned = [parameters[number] for number in numbers]
        if sum(parameter.nbytes for _, parameter in owned) != size_bytes:
            return ()
        paths = list(dict.fromkeys(path for path, _ in owned))
        buckets.append(_Bucket(size_bytes, tuple(paths[:MAX_BUCKET_MODULES])))
    return buckets


def _reduced_parameters(model: DistributedDataParallel) -> Iterator[tuple[str, Parameter]]:
    """Yield the parameters in the order of the reducer, each with the path of the first module that has it."""
    title, ignored = class_of(unwrapped(model)), model.parameters_to_ignore
    seen = {id(parameter) for name, parameter in model.module.named_parameters() if name in ignored}
    for module, path, *_ in walk(model.module, ""):
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                yield path or title, parameter
