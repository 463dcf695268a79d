"""Gradient norms of a step, as each optimizer gets them."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import count, repeat
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor, distributed
from torch.compiler import is_compiling
from torch.nn import Module
from torch.optim import Optimizer

from torchotel._records import GradientNorms, ModuleInfo
from torchotel._utils.faults import Guard, Warn
from torchotel.capture.call_signatures import info_of
from torchotel.capture.gradient_shards import GradientShards, is_partial
from torchotel.capture.module_registry import modules_of
from torchotel.capture.tensor_norms import Norms, Scale, combined, norms_async
from torchotel.capture.torch_internals import graph_task, version_of, without_torch_function

if TYPE_CHECKING:
    from torchotel.capture.grad_scaler import Scaling
    from torchotel.capture.module_registry import ModuleRegistry
    from torchotel.capture.step_segment import StepSegment
    from torchotel.capture.thread_state import ThreadState


class GradientReadback:
    """The norms of gradients that were read at one moment.

    Args:
        owners: The module of each gradient, in the order of the model's modules.
        norms: Of each gradient; None if they can't be known.
        sharded: Whether other ranks have other parts of the gradients.
    """

    __slots__ = ("_norms", "_owners", "sharded")

    def __init__(self, owners: list[ModuleInfo], norms: Norms | None, *, sharded: bool) -> None:
        self._owners, self._norms, self.sharded = owners, norms, sharded

    def ready(self) -> bool:
        """Return whether the norms are computed, without waiting; for a training thread."""
        return self._norms is None or self._norms.ready()

    def wait(self) -> None:
        """Wait until the norms are computed."""
        if self._norms is not None:
            self._norms.wait()

    def owners(self) -> list[ModuleInfo]:
        """Return the module of each gradient."""
        return self._owners

    def values(self) -> list[float | None] | None:
        """Return the norm of each gradient, None for an unknown one; None if they are not ready or can't be known."""
        return None if self._norms is None else self._norms.values()


GradientState: TypeAlias = tuple[weakref.ref[Tensor], int | None, GradientReadback, int]
"""A gradient whose norm was read, its version then, its norm's readback and position. Version None: clipped since."""


class SelectedNorms:
    """The norms of some gradients of one or several readbacks.

    Args:
        positions: The positions of these gradients in each readback.
    """

    __slots__ = ("_positions",)

    def __init__(self, positions: Mapping[GradientReadback, Collection[int]]) -> None:
        self._positions = positions

    def ready(self) -> bool:
        """Return whether all of them are computed, without waiting; for a training thread."""
        return all(readback.ready() for readback in self._positions)

    def wait(self) -> None:
        """Wait until all of them are computed."""
        for readback in self._positions:
            readback.wait()

    def owners(self) -> Iterator[ModuleInfo]:
        """Yield the module of each gradient."""
        for readback, positions in self._positions.items():
            owners = readback.owners()
            yield from (owners[position] for position in positions)

    def sharded(self) -> bool:
        """Return whether other ranks have other parts of the gradients."""
        return any(readback.sharded for readback in self._positions)

    def values(self) -> list[tuple[ModuleInfo, float]] | None:
        """Return the module and the norm of each gradient with a known norm; None if a reading is not ready."""
        found = []
        for readback, positions in self._positions.items():
            values, owners = readback.values(), readback.owners()
            if values is None:
                return None
            found += [(owners[position], value) for position in positions if (value := values[position]) is not None]
        return found


AFTER_BACKWARD = None
"""Key of the norms that the last backward left."""

NormsByOptimizer: TypeAlias = Mapping[Hashable, SelectedNorms]
"""Norms by the optimizer that got the gradients, and at `AFTER_BACKWARD` those that the last backward left."""


def step_norms(segments: Iterable[NormsByOptimizer]) -> GradientNorms | None:
    """Return the norms of a step's gradients as its optimizers got them, or the last backward's if none stepped.

    Args:
        segments: The norms of the step's segments, in order. The last step of each optimizer counts. Of a sharded
            parameter this rank's shard counts, and of a replicated one the first rank's, which needs no collective.
    """
    last: dict[Hashable, SelectedNorms] = {}
    order: dict[ModuleInfo, None] = {}
    for segment in segments:
        last.update(segment)
        if AFTER_BACKWARD in segment:
            order.update(dict.fromkeys(segment[AFTER_BACKWARD].owners()))
    if len(last) > 1:
        last.pop(AFTER_BACKWARD, None)
    modules: dict[ModuleInfo, list[float]] = {owner: [] for owner in order}
    for norms in last.values():
        values = norms.values()
        if values is None:
            return None
        for owner, value in values:
            modules.setdefault(owner, []).append(value)
    known = {owner: combined(own) for owner, own in modules.items() if own}
    sharded = any(norms.sharded() for norms in last.values())
    return GradientNorms(combined([*known.values()]), tuple(known.items()), sharded) if known else None


LEFT_OUT = "the norm of a gradient of %s can't be known (%s): it and its like are left out of the total"
STEPS_AFTER_LOSS = 8
"""Steps whose norms are read after a loss that is not finite."""
STEPS_BETWEEN_LOOKS = 64
"""Steps before that happens again: a loss may stay NaN for the rest of a run."""


class Gradients:
    """Decide on which steps gradient norms are read, and read them.

    Args:
        registry: The modules' states and names.
        warn: Logs a warning once.
        setting: "auto" (on detailed steps), True (on every step), n for every n-th, or False. Unless it is False, norms
            are also read on some steps after a loss that is not finite.
    """

    def __init__(self, registry: ModuleRegistry, warn: Warn, *, setting: str | bool | int) -> None:
        self._registry, self._warn = registry, warn
        self._every = 0 if setting == "auto" else int(setting)
        self._with_detail = setting == "auto"
        self.beyond_detail = self._every > 0
        """Whether norms may be read on steps without detail."""
        self._after_loss, self._next_look = range(0), 0
        self.pipeline_stages = weakref.WeakValueDictionary[int, Module]()
        """Modules of pipeline stages, by `id()`: other ranks have the gradients of other stages."""
        self.guard = Guard("gradient norms", off=self._off)

    def note_bad_loss(self, number: int) -> None:
        """Read the norms of the next steps after a loss that is not finite: they show which layers are not finite.

        Args:
            number: The number of the next step.
        """
        if (self._with_detail or self._every) and number >= self._next_look:
            self._after_loss = range(number, number + STEPS_AFTER_LOSS)
            self._next_look = number + STEPS_BETWEEN_LOOKS
            self.beyond_detail = True

    def backward_ended(self, thread: ThreadState, number: int) -> None:
        """Read the norms after the thread's outermost backward, if the step's norms are wanted.

        Args:
            thread: The calling thread's state.
            number: How many steps were recorded before.
        """
        segment = thread.step_detector.open_segment
        if segment is None or not self._can_read(thread, number):  # None: another thread has ended the capture
            return
        scaler = thread.scaling.scaler
        try:
            found = self.read(_models_of(thread), thread.scaling, scaler)
            segment.read, thread.read_in_closure = found, bool(thread.step_detector.stepping)
            segment.gradients = {**segment.gradients, AFTER_BACKWARD: _selected(found.values())}
        except Exception:  # noqa: BLE001  # no internal error may reach the user's backward
            self.guard.fault()

    def clipping_begins(self, thread: ThreadState, gradients: Sequence[Tensor], number: int) -> None:
        """Read gradients that changed since their backward before they are clipped; later changes do not count.

        Args:
            thread: The calling thread's state.
            gradients: Those that are about to be clipped.
            number: How many steps were recorded before.
        """
        if not self._can_read(thread, number):
            return
        try:
            with without_torch_function():
                read = self._read_changed(thread, gradients)
            for key in map(id, gradients):
                if key in read:
                    gradient, _, readback, position = read[key]
                    read[key] = gradient, None, readback, position
        except Exception:  # noqa: BLE001  # no internal error may reach the user's clipping
            self.guard.fault()

    def optimizer_begins(
        self, thread: ThreadState, segment: StepSegment, optimizer: Optimizer, number: int, *, closure: bool
    ) -> None:
        """Read the norms of an optimizer's gradients, again for those that changed since their backward.

        Args:
            thread: The calling thread's state.
            segment: The segment that the optimizer's step belongs to.
            optimizer: The optimizer that begins its step.
            number: How many steps were recorded before.
            closure: Whether it got a closure, which most likely runs the backward.
        """
        thread.read_in_closure = False
        if thread.events.in_backward or (closure and segment.read is None) or not self._can_read(thread, number):
            return
        try:
            with without_torch_function():
                gradients = _gradients_of_optimizer(optimizer)
                scale = getattr(optimizer, "grad_scale", None)  # a fused step divides by it
                read = self._read_changed(thread, gradients, scale if isinstance(scale, Tensor) else None)
            self._note_optimizer(segment, optimizer, gradients, read)
        except Exception:  # noqa: BLE001  # an optimizer of the user's may have other groups
            self.guard.fault()

    def optimizer_ends(self, thread: ThreadState, segment: StepSegment, optimizer: Optimizer) -> None:
        """Use the norms after the last backward: it ran in the optimizer's step, or a scaler skipped the step."""
        thread.read_in_closure = False
        try:
            with without_torch_function():
                gradients = _gradients_of_optimizer(optimizer)
            self._note_optimizer(segment, optimizer, gradients, _read_of(thread))
        except Exception:  # noqa: BLE001  # an optimizer of the user's may have other groups
            self.guard.fault()

    def unscaled(self, thread: ThreadState, optimizer: Optimizer, number: int, *, stepped: bool) -> None:
        """Note that a scaler has unscaled an optimizer's gradients, on steps whose norms are read."""
        try:
            if self._wanted_now(thread, number):
                thread.scaling.unscaled(optimizer, stepped=stepped)
        except Exception:  # noqa: BLE001  # an optimizer of the user's may have other groups
            self.guard.fault()

    def _can_read(self, thread: ThreadState, number: int) -> bool:
        if not self._wanted_now(thread, number):
            return False
        return not (thread.root.in_forward or is_compiling() or graph_task() != -1)

    def _wanted_now(self, thread: ThreadState, number: int) -> bool:
        segment = thread.step_detector.open_segment
        if segment is None:
            return False
        if self._with_detail and segment.detailed:
            return True
        if not self.beyond_detail:
            return False
        step = number + segment.ahead
        if step >= self._after_loss.stop:
            self.beyond_detail = self._every > 0
        return step in self._after_loss or (self._every > 0 and step % self._every == 0)

    def _read_changed(
        self, thread: ThreadState, gradients: Sequence[Tensor], scale: Tensor | None = None
    ) -> dict[int, GradientState]:
        """Read those gradients again that are not as they were when they were read; return all that were read.

        What `GradScaler` does to gradients does not count as a change: its operation leaves their versions.

        Args:
            thread: The calling thread's state.
            gradients: Those to look at.
            scale: The factor by which the optimizer will divide them.
        """
        read, segment = _read_of(thread), thread.step_detector.open_segment
        changed = _changed(gradients, read)
        if changed:
            read.update(self.read(_models_of(thread), None, scale, changed))
            if segment is not None:  # else another thread has ended the capture
                segment.read = read
        return read

    @staticmethod
    def _note_optimizer(
        segment: StepSegment, optimizer: Optimizer, gradients: Sequence[Tensor], read: dict[int, GradientState]
    ) -> None:
        states = [state for gradient in gradients if (state := read.get(id(gradient))) is not None]
        if states:
            segment.gradients = {**segment.gradients, id(optimizer): _selected(states)}

    def read(
        self,
        models: Iterable[Module],
        scaling: Scaling | None = None,
        scale: Scale | None = None,
        wanted: Collection[int] | None = None,
    ) -> dict[int, GradientState]:
        """Read the norms of all gradients of the models' parameters; return them by the gradient's `id()`.

        A shared parameter counts for the first module that holds it. A gradient whose norm can't be known is left out
        of the total, which logs a warning once.

        Args:
            models: For a part of a model, the whole model is read.
            scaling: Tells which gradients are unscaled already.
            scale: The factor on the others.
            wanted: The `id()`s of gradients; None: all.
        """
        owners: list[ModuleInfo] = []
        gradients: list[Tensor] = []
        shards = GradientShards(self.pipeline_stages)
        look = shards.look if distributed.is_available() and distributed.is_initialized() else lambda _: None
        seen: set[int] = set()
        with without_torch_function():
            for root in {id(top): top for top in map(self._registry.topmost, models)}.values():
                for module in modules_of(root):
                    look(module)
                    if module._parameters and (own := _gradients_of(module, seen, wanted)):
                        gradients += own
                        owners += [self._info(module, root)] * len(own)
            if not gradients:
                return {}
            unscaled = scaling.unscaled_of(gradients) if scaling is not None and scale is not None else ()
            norms = norms_async(gradients, scale, unscaled, shards.counted_elsewhere(gradients))
            if norms is not None and norms.left_out:
                position = norms.left_out[0]
                self._warn(LEFT_OUT, owners[position], _kind(gradients[position]))
            readback = GradientReadback(owners, norms, sharded=shards.sharded)
            references, versions = map(weakref.ref, gradients), map(version_of, gradients)
            states = zip(references, versions, repeat(readback), count(), strict=False)
            return dict(zip(map(id, gradients), states, strict=True))

    def _info(self, module: Module, root: Module) -> ModuleInfo:
        state = self._registry.states.get(id(module))
        if state is None or not state.in_place(module):
            self._registry.register_model(root)
            state = self._registry.states[id(module)]
        return info_of(state, module)

    def _off(self) -> None:
        self._with_detail, self._every, self.beyond_detail = False, 0, False


def _kind(tensor: Tensor) -> str:
    kind = f"{type(tensor).__name__}, {tensor.layout}, {tensor.dtype}"
    return f"{kind}, a partial sum that this rank does not add to those of others" if is_partial(tensor) else kind


def _models_of(thread: ThreadState) -> list[Module]:
    """Return the living models of the step that is open."""
    segments = thread.step_detector.segments
    models = {key: model for segment in segments for key, ref in segment.models.items() if (model := ref()) is not None}
    return [*models.values()]


def _read_of(thread: ThreadState) -> dict[int, GradientState]:
    """Return how the gradients of the open step were when they were last read."""
    return next((segment.read for segment in reversed(thread.step_detector.segments) if segment.read is not None), {})


def _changed(gradients: Sequence[Tensor], read: Mapping[int, GradientState]) -> set[int]:
    """Return the `id()`s of those that are not as they were when they were read; there may be thousands."""
    changed = set()
    for gradient in gradients:
        state = read.get(id(gradient))
        if state is None or state[0]() is not gradient or (state[1] is not None and state[1] != version_of(gradient)):
            changed.add(id(gradient))
    return changed


def _selected(states: Iterable[GradientState]) -> SelectedNorms:
    positions: defaultdict[GradientReadback, list[int]] = defaultdict(list)
    for _, _, readback, position in states:
        positions[readback].append(position)
    return SelectedNorms(positions)


def _gradients_of_optimizer(optimizer: Optimizer) -> list[Tensor]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _gradients_of(module: Module, seen: set[int], wanted: Collection[int] | None) -> list[Tensor]:
    """Return the gradients of a module's own parameters that were not seen before.

    Args:
        module: Its own parameters are looked at.
        seen: The `id()`s of parameters that were seen before; those of the module are added.
        wanted: The `id()`s of gradients; None: all.
    """
    found = []
    for parameter in module._parameters.values():
        if parameter is None or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        # Inside `torch.func` a parameter may be replaced by a tensor that is no leaf.
        gradient = parameter.grad if parameter.requires_grad and parameter.is_leaf else None
        if gradient is not None and (wanted is None or id(gradient) in wanted):
            found.append(gradient)
    return found
