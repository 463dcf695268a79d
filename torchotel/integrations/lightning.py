"""Lightning: epoch, step, loss and logged values of a Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torch import Tensor

from torchotel.capture.logged_values import NUMBERS
from torchotel.integrations.registry import publish, subscriber


class LightningEvents:
    """Tell of each step of a Trainer's, and of what an epoch and a validation have found when they are over."""

    def __init__(self) -> None:
        super().__init__()
        self._told: set[str] = set()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Tell what is known of the step."""
        publish(lambda: {"epoch": trainer.current_epoch, "global_step": trainer.global_step})
        publish(lambda: {**self._logged(trainer, on_step=True), **_loss(trainer, pl_module, outputs)})

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Tell what a validation has found."""
        publish(lambda: {} if trainer.sanity_checking else _named("val", self._logged(trainer, on_step=False)))

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Tell what the epoch before has found: only now is it computed."""
        publish(lambda: self._of_epoch(trainer))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Tell what the last epoch has found."""
        publish(lambda: self._of_epoch(trainer))

    def _logged(self, trainer: Any, *, on_step: bool) -> dict[str, object]:
        values = _logged(trainer, on_step=on_step)
        self._told |= values.keys()
        return values

    def _of_epoch(self, trainer: Any) -> dict[str, object]:
        return _named("epoch", {n: value for n, value in trainer.logged_metrics.items() if n not in self._told})


def _named(whose: str, values: Mapping[str, object]) -> dict[str, object]:
    """Keep what is a whole validation's or epoch's apart from what a step has under the same name."""
    return {f"{whose}_{name}" if name in NUMBERS else name: value for name, value in values.items()}


def _logged(trainer: Any, *, on_step: bool) -> dict[str, object]:
    """Return what was logged; Lightning's own way to it waits for the device, where the progress bar shows a value."""
    values = {}
    for _, result in trainer._results.valid_items():  # noqa: SLF001  # the public way waits
        meta = result.meta
        if meta.logger and (meta.on_step if on_step else meta.on_epoch):
            values[meta.forked_name(on_step)] = result._forward_cache if on_step else result._computed  # noqa: SLF001  # as above
    return values


def _loss(trainer: Any, pl_module: Any, outputs: Any) -> dict[str, Tensor]:
    """Return the loss of the batch, which Lightning has divided where it accumulates."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
    if not isinstance(loss, Tensor):
        return {}
    parts = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
    return {"loss": loss if parts == 1 else loss * parts}


def lightning() -> list[object]:
    """Give the callback for `lightning`; none where nobody hears it."""
    return _callbacks("torchotel.integrations.lightning_callback")


def pytorch_lightning() -> list[object]:
    """Give the callback for `pytorch_lightning`; none where nobody hears it."""
    return _callbacks("torchotel.integrations.pytorch_lightning_callback")


def _callbacks(name: str) -> list[object]:
    heard = subscriber()
    return [] if heard is None else heard.guard.guarded(lambda: [import_module(name).TorchotelCallback()])() or []
