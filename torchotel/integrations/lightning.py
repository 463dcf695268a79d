"""Publish epoch, step, loss and logged values of a Lightning Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

from torch import Tensor

from torchotel._semconv import LOGGED_NAMES
from torchotel.integrations.registry import current_subscriber, publish


class LightningEvents:
    """Publish the values of each training step, and the results of each epoch and validation at their end.

    A class for `lightning` or `pytorch_lightning` also inherits from that framework's `Callback`.
    """

    framework: str
    """Module with the `Callback` class."""

    def __init__(self) -> None:
        super().__init__()
        self._published_names: set[str] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by framework: the class is created when it is needed, so pickle cannot find it by its name."""
        # Not __dict__: the Trainer adds `log`, a method of the module, which may not be picklable.
        return _make_callback, (self.framework,), {"_published_names": self._published_names}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Publish epoch, step number, loss and logged values of the step."""
        publish(lambda: {"epoch": trainer.current_epoch, "global_step": trainer.global_step})
        publish(lambda: {**self._logged(trainer, on_step=True), **_loss(trainer, pl_module, outputs)})

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Publish the results of a validation, except Lightning's sanity check."""
        publish(lambda: {} if trainer.sanity_checking else _prefixed("val", self._logged(trainer, on_step=False)))

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Publish the results of the previous epoch; Lightning computes them after that epoch's last hook."""
        publish(lambda: self._epoch_results(trainer))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Publish the results of the last epoch."""
        publish(lambda: self._epoch_results(trainer))

    def _logged(self, trainer: Any, *, on_step: bool) -> dict[str, object]:
        values = _logged(trainer, on_step=on_step)
        self._published_names |= values.keys()
        return values

    def _epoch_results(self, trainer: Any) -> dict[str, object]:
        metrics = trainer.logged_metrics.items()
        return _prefixed("epoch", {name: value for name, value in metrics if name not in self._published_names})


def _prefixed(prefix: str, values: Mapping[str, object]) -> dict[str, object]:
    """Add a prefix to the names of step values, so that results of a validation or an epoch do not overwrite them."""
    return {f"{prefix}_{name}" if name in LOGGED_NAMES else name: value for name, value in values.items()}


def _logged(trainer: Any, *, on_step: bool) -> dict[str, object]:
    """Return logged values. `Trainer.logged_metrics` would wait for the device if the progress bar shows a value."""
    values = {}
    for _, result in trainer._results.valid_items():  # noqa: SLF001  # the public property waits for the device
        meta = result.meta
        if meta.logger and (meta.on_step if on_step else meta.on_epoch):
            value = result._forward_cache if on_step else result._computed  # noqa: SLF001  # no public access
            values[meta.forked_name(on_step)] = value
    return values


def _loss(trainer: Any, pl_module: Any, outputs: Any) -> dict[str, Tensor]:
    """Return the loss of the batch. Lightning divides the loss by the number of accumulated batches; this is undone."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
    if not isinstance(loss, Tensor):
        return {}
    parts = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
    return {"loss": loss if parts == 1 else loss * parts}


def lightning() -> list[object]:
    """Return the callback for a Trainer of `lightning`; empty if torchotel is not running."""
    return _callbacks("lightning.pytorch")


def pytorch_lightning() -> list[object]:
    """Return the callback for a Trainer of `pytorch_lightning`; empty if torchotel is not running."""
    return _callbacks("pytorch_lightning")


def _callbacks(framework: str) -> list[object]:
    subscriber = current_subscriber()
    return [] if subscriber is None else subscriber.guard.guarded(lambda: [_make_callback(framework)])() or []


def _make_callback(framework: str) -> object:
    return _callback_class(framework)()


@cache
def _callback_class(framework: str) -> type[LightningEvents]:
    callback = import_module(framework).Callback
    return type("TorchotelCallback", (LightningEvents, callback), {"framework": framework})
