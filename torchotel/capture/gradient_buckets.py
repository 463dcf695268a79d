"""Name the modules whose gradients a collective of DistributedDataParallel reduces."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from torchotel._limits import MAX_BUCKET_MODULES
from torchotel._utils.faults import Guard
from torchotel.capture.module_registry import class_of, unwrapped, walk
from torchotel.capture.torch_internals import (
    GROUPS_HAVE_HOOKS,
    bucket_layout,
    has_communication_hook,
    reduced_parameters,
    without_torch_function,
)

if TYPE_CHECKING:
    from torchotel._records import Phase
    from torchotel.capture.collectives import GroupHooks, OpenCollective

MAX_READS = 16
"""Forwards in which the buckets of a model are looked for: DistributedDataParallel arranges them in the first few."""


class _Bucket(NamedTuple):
    size_bytes: int
    modules: tuple[str, ...]
    """The paths of the first modules, in the order in which the backward reaches them."""


class _Reducer:
    """What is known of the reducer of a model."""

    __slots__ = ("buckets", "group", "reads", "reduces")

    def __init__(self, model: DistributedDataParallel) -> None:
        self.group = weakref.ref(model.process_group)
        self.buckets: Sequence[_Bucket] = ()
        """In the order of their collectives; empty: not known."""
        self.reads = 0
        self.reduces = False
        """Whether the backward of the last forward reduces gradients: not so in `no_sync`."""


class GradientBuckets:
    """Read the buckets of models of DistributedDataParallel, and name the collectives that reduce them.

    A name is left out rather than guessed. The buckets of all models that a step trains have to be known, and the
    collectives of a backward have to be the buckets of exactly one model, by number and size.
    """

    def __init__(self) -> None:
        self.guard = Guard("the names of gradient buckets", off=self._switch_off)
        self._reducers: weakref.WeakKeyDictionary[DistributedDataParallel, _Reducer] = weakref.WeakKeyDictionary()
        self._is_on = GROUPS_HAVE_HOOKS
        self._guarded_read, self._guarded_name = self.guard.guarded(self._read), self.guard.guarded(self._name)

    def forward_begins(self, model: Module) -> None:
        """Read the buckets of a model until they are known.

        Called at the start of a forward with gradients, outside of a backward. The reducer's lock is taken here, as
        the forward of DistributedDataParallel does next. Anywhere else, the thread may have this lock, which cannot be
        taken twice: a handler of a signal may run in a communication hook.
        """
        if self._is_on and isinstance(model, DistributedDataParallel):
            self._guarded_read(model)

    def name(
        self, collectives: Sequence[OpenCollective], phases: Iterable[Phase], models: Iterable[weakref.ref[Module]]
    ) -> None:
        """Name the modules of the collectives that reduce buckets.

        Args:
            collectives: The collectives of a segment of a step, in the order of their starts.
            phases: The phases of the segment, in the order of their starts.
            models: The models whose forwards with gradients have run in the segment.
        """
        if self._is_on and self._reducers and collectives:
            self._guarded_name(collectives, phases, models)

    def _switch_off(self) -> None:
        self._is_on = False

    def _read(self, model: DistributedDataParallel) -> None:
        known = self._reducers.get(model)
        if known is None:
            known = self._reducers[model] = _Reducer(model)
        known.reduces = bool(model.require_backward_grad_sync)
        if known.reduces and not known.buckets and known.reads < MAX_READS:
            known.reads += 1
            if layout := bucket_layout(model):
                known.reads = MAX_READS
                with without_torch_function():
                    known.buckets = _buckets(model, layout)

    def _name(
        self, collectives: Sequence[OpenCollective], phases: Iterable[Phase], models: Iterable[weakref.ref[Module]]
    ) -> None:
        alive = [model for reference in models if (model := reference()) is not None]
        with without_torch_function():
            reducers = [self._reducer(model) for model in alive if _has_parameters(model)]
        if None in reducers:
            return
        backwards = [phase for phase in phases if phase.kind == "backward"]
        starts = [phase.start_ns for phase in backwards]
        reduced: dict[tuple[int, GroupHooks], list[OpenCollective]] = defaultdict(list)
        for one in collectives:
            last = bisect_right(starts, one.start_ns) - 1
            if one.operation == "all_reduce" and last >= 0 and one.start_ns <= backwards[last].end_ns:
                reduced[last, one.group].append(one)
        for (_, group), found in reduced.items():
            of_group = [known.buckets for known in reducers if known and known.group == group.process_group]
            _name_backward(of_group, found)

    def _reducer(self, model: Module) -> _Reducer | None:
        """Return what is known of a model; None if its collectives may not be those of its buckets."""
        if not isinstance(model, DistributedDataParallel) or has_communication_hook(model):
            return None
        known = self._reducers.get(model)
        return known if known is not None and known.buckets and known.reduces else None


def _has_parameters(model: Module) -> bool:
    """Return whether a model has parameters to train: a loss function has none."""
    return any(parameter.requires_grad for parameter in model.parameters())


def _name_backward(models: Iterable[Sequence[_Bucket]], collectives: Sequence[OpenCollective]) -> None:
    """Name the collectives of one process group in one backward."""
    sizes = [collective.size_bytes for collective in collectives]
    found = [buckets for buckets in models if [bucket.size_bytes for bucket in buckets] == sizes]
    if len(found) == 1:
        for collective, bucket in zip(collectives, found[0], strict=True):
            collective.modules = bucket.modules


def _buckets(model: DistributedDataParallel, layout: Sequence[tuple[int, Sequence[int]]]) -> Sequence[_Bucket]:
    """Return the buckets; none if the parameters are not those of the reducer, as after a layer was frozen."""
    title, paths = class_of(unwrapped(model)), dict[int, str]()
    for module, path, *_ in walk(model.module, ""):
        for parameter in module._parameters.values():
            paths.setdefault(id(parameter), path or title)
    parameters = reduced_parameters(model)
    if sorted(number for _, numbers in layout for number in numbers) != [*range(len(parameters))]:
        return ()
    buckets = []
    for size_bytes, numbers in layout:
        owned = [parameters[number] for number in numbers]
        if sum(parameter.nbytes for parameter in owned) != size_bytes:
            return ()
        if not all(id(parameter) in paths for parameter in owned):
            return ()
        modules = dict.fromkeys(paths[id(parameter)] for parameter in owned)
        buckets.append(_Bucket(size_bytes, tuple(modules)[:MAX_BUCKET_MODULES]))
    return buckets
