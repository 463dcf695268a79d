"""Which losses `GradScaler`s have scaled on one thread, and which gradients they have unscaled."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from torchotel.capture.torch_internals import version_of


class Scaled:
    """One call of `GradScaler.scale`."""

    __slots__ = ("scaler",)

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = weakref.ref(scaler)


class Scaling:
    """Track whose scale is on the gradients of the backward that runs, and which gradients are unscaled.

    A backward of a tensor that `scale` returned has that scaler. A backward of a tensor computed from it, such as one
    share of a batch, has the last scaler, unless that scaler's last loss had its own backward or `update` was called.
    """

    def __init__(self) -> None:
        self._losses: dict[int, tuple[weakref.ref[Tensor], Scaled]] = {}
        self._last: Scaled | None = None
        self._running: Scaled | None = None
        self._direct = False
        self._unscaled: dict[int, tuple[weakref.ref[Tensor], int | None]] = {}

    @property
    def scaler(self) -> GradScaler | None:
        """The scaler whose scale is on the gradients of the backward that runs, or has just run."""
        return None if self._running is None else self._running.scaler()

    def scaled(self, scaler: GradScaler, losses: Any) -> None:
        """Note the losses that a scaler has scaled."""
        self._last = scaled = Scaled(scaler)
        for loss in losses if isinstance(losses, list | tuple) else [losses]:
            if isinstance(loss, Tensor):
                self._losses[id(loss)] = weakref.ref(loss, _drop(self._losses, id(loss))), scaled

    def backward_begins(self, roots: Any) -> None:
        """Find out whether an outermost backward begins at a scaled loss."""
        found = None
        if self._losses:
            for root in roots if isinstance(roots, Sequence) else [roots]:
                loss, scaled = self._losses.get(id(root), (None, None))
                if loss is not None and loss() is root:
                    found = scaled
        self._direct, self._running = found is not None, found or self._last

    def backward_ended(self, *, accumulates: bool) -> None:
        """End the outermost backward."""
        if accumulates and self._direct and self._running is self._last:
            self._last = None
        self._running = None

    def unscaled(self, optimizer: torch.optim.Optimizer, *, stepped: bool) -> None:
        """Note that an optimizer's gradients are unscaled.

        Args:
            optimizer: The optimizer.
            stepped: Whether it has stepped, too. Until then its gradients may be clipped, and nothing adds to them; a
                gradient that changes after the step is scaled again.
        """
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is not None:
                    version = version_of(gradient) if stepped else None
                    key = id(gradient)
                    self._unscaled[key] = weakref.ref(gradient, _drop(self._unscaled, key)), version

    def updated(self) -> None:
        """Note a call of `update`: the scaler has a new scale."""
        self._last = None
        for key, (ref, version) in list(self._unscaled.items()):
            gradient = ref()
            if gradient is not None and version is None:
                self._unscaled[key] = ref, version_of(gradient)

    def unscaled_of(self, gradients: Iterable[Tensor]) -> set[int]:
        """Return the positions of the unscaled gradients."""
        if not self._unscaled:
            return set()
        return {position for position, gradient in enumerate(gradients) if self._has_own_size(gradient)}

    def _has_own_size(self, gradient: Tensor) -> bool:
        ref, version = self._unscaled.get(id(gradient), (None, None))
        return ref is not None and ref() is gradient and version in {None, version_of(gradient)}


def _drop(table: dict[int, Any], key: int) -> Any:
    return lambda _: table.pop(key, None)
