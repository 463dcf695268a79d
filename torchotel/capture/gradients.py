"""Gradient norms of the models of a step, taken when a backward has ended.

That is before clipping, and right also where forward and backward run inside `optimizer.step(closure)`. Several
backwards of a step add up in `grad`, so the last one's norms are the step's.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Module

from torchotel._guard import Guard
from torchotel._records import GradientNorms, ModuleInfo
from torchotel._warn import Warn
from torchotel.capture.norms import Norms, combined, norms_later
from torchotel.capture.seams import graph_task, without_torch_function
from torchotel.capture.sites import info_of
from torchotel.capture.tree import modules_of

if TYPE_CHECKING:
    from torchotel.capture.parts import Part
    from torchotel.capture.paths import Paths
    from torchotel.capture.scaling import Scaling
    from torchotel.capture.thread import ThreadState

LEFT_OUT = "the norm of a gradient of %s can't be known (%s): it and its like are left out of the total"


class PendingNorms:
    """The gradient norms of a step, on their way.

    Args:
        owners: The module of each gradient, in the order of the model's modules.
        norms: Of each gradient.
    """

    __slots__ = ("_norms", "_owners")

    def __init__(self, owners: list[ModuleInfo], norms: Norms) -> None:
        self._owners, self._norms = owners, norms

    def ready(self) -> bool:
        """Tell whether they are there, without waiting; to be asked on a training thread."""
        return self._norms.ready()

    def wait(self) -> None:
        """Wait until they are there."""
        self._norms.wait()

    def result(self) -> GradientNorms | None:
        """Put together those that are known; None where they are not ready."""
        values = self._norms.values()
        if values is None:
            return None
        modules: dict[ModuleInfo, list[float]] = {}
        for owner, value in zip(self._owners, values, strict=True):
            if value is not None:
                modules.setdefault(owner, []).append(value)
        known = [value for own in modules.values() for value in own]
        return GradientNorms(combined(known), tuple((owner, combined(own)) for owner, own in modules.items()))


class Gradients:
    """Decide where norms are taken, and take them.

    Args:
        paths: Names of modules.
        warn: Called with what the user is to know.
        setting: "auto" (on detailed steps), True (on every step), n for every n-th, or False.
    """

    def __init__(self, paths: Paths, warn: Warn, *, setting: str | bool | int) -> None:
        self._paths, self._warn = paths, warn
        self._every = 0 if setting == "auto" else int(setting)
        self._with_detail = setting == "auto"
        self.guard = Guard("gradient norms", off=self._off)

    def note_model(self, part: Part, module: Module) -> None:
        """Remember an outermost module that ran with gradients on: what is part of its model may get some."""
        if self._with_detail or self._every:
            part.models[id(module)] = weakref.ref(module)

    def backward_ended(self, thread: ThreadState, number: int) -> None:
        """Take the norms that the thread's outermost backward has left, where they are wanted.

        Args:
            thread: The calling thread's state.
            number: How many steps were handed over before.
        """
        if not self._wanted_now(thread, number):
            return
        if thread.in_forward or is_compiling() or graph_task() != -1:
            return
        parts = thread.machine.parts
        try:
            models = {key: model for part in parts for key, ref in part.models.items() if (model := ref()) is not None}
            pending = self.take(models.values(), thread.scaling)
            if pending is not None:
                parts[-1].gradients = pending
        except Exception:  # noqa: BLE001  # nothing of ours may reach the user's backward
            self.guard.fault()

    def unscaled(self, thread: ThreadState, optimizer: torch.optim.Optimizer, number: int, *, stepped: bool) -> None:
        """Note that a scaler has brought an optimizer's gradients back, where norms may be taken beside them."""
        try:
            if self._wanted_now(thread, number):
                thread.scaling.unscaled(optimizer, stepped=stepped)
        except Exception:  # noqa: BLE001  # an optimizer of the user's may have other groups
            self.guard.fault()

    def _wanted_now(self, thread: ThreadState, number: int) -> bool:
        part = thread.machine.open_part
        if part is None:
            return False
        if self._with_detail:
            return bool(part.detailed)
        return self._every > 0 and (number + part.ahead) % self._every == 0

    def take(self, models: Iterable[Module], scaling: Scaling) -> PendingNorms | None:
        """Take the norms of all gradients that the models' parameters have; None where there are none.

        A parameter that several modules hold is the first one's. One that is frozen got no gradient. A gradient whose
        norm can't be known is left out, which is warned of once: the total is over the others.

        Args:
            models: Parts of models count as the whole.
            scaling: What of them is scaled.
        """
        owners: list[ModuleInfo] = []
        gradients: list[Tensor] = []
        seen: set[int] = set()
        with without_torch_function():
            for root in {id(top): top for top in map(self._paths.topmost, models)}.values():
                for module in modules_of(root):
                    if module._parameters and (own := _gradients_of(module, seen)):
                        gradients += own
                        owners += [self._info(module, root)] * len(own)
        scaler = scaling.scaler
        unscaled = scaling.unscaled_of(gradients) if scaler is not None else ()
        norms = norms_later(gradients, scaler, unscaled) if gradients else None
        if norms is None:
            return None
        if norms.left_out:
            place = norms.left_out[0]
            self._warn(LEFT_OUT, owners[place], _kind(gradients[place]))
        return PendingNorms(owners, norms)

    def _info(self, module: Module, root: Module) -> ModuleInfo:
        state = self._paths.states.get(id(module))
        if state is None or not state.in_place(module):
            self._paths.learn(root)
            state = self._paths.states[id(module)]
        return info_of(state, module)

    def _off(self) -> None:
        self._with_detail, self._every = False, 0


def _kind(tensor: Tensor) -> str:
    return f"{type(tensor).__name__}, {tensor.layout}, {tensor.dtype}"


def _gradients_of(module: Module, seen: set[int]) -> list[Tensor]:
    """Return the gradients of a module's own parameters that were not seen before."""
    found = []
    for parameter in module._parameters.values():
        if parameter is None or id(parameter) in seen:
            continue
        seen.add(id(parameter))
        # What stands in a parameter's place while a function of it is differentiated may be no leaf.
        if parameter.requires_grad and parameter.is_leaf and (gradient := parameter.grad) is not None:
            found.append(gradient)
    return found
