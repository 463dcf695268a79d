"""Publish epoch, step number and logged values of Hugging Face's Trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from torchotel.integrations.registry import publish

AFTER_STEP_NAMES = frozenset({"epoch", "learning_rate"})
"""Logged values that belong to the state after the step: the epoch is published as it was before the step, and the
learning rate is read from the optimizer."""


class TorchotelCallback(TrainerCallback):
    """Publish the values of each step."""

    _epoch: float | None = None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Store the epoch before the step: after the last step of an epoch, the state has the next one."""
        self._epoch = getattr(state, "epoch", None)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Publish the epoch and the step number."""
        publish(lambda: {"epoch": self._epoch, "global_step": state.global_step})

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, object] | None = None,
        **kwargs: Any,
    ) -> None:
        """Publish logged values: the mean loss since the last log, the metrics of an evaluation."""
        publish(lambda: {name: value for name, value in (logs or {}).items() if name not in AFTER_STEP_NAMES})


def connect(trainer: ModuleType) -> Callable[[], None]:
    """Add the callback to each Trainer that is created from now on; return the function that ends this."""
    defaults = trainer.DEFAULT_CALLBACKS
    defaults.append(TorchotelCallback)
    return lambda: defaults.remove(TorchotelCallback)
