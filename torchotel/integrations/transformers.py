"""Hugging Face's Trainer tells its callbacks the epoch, the step, and what it logs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from torchotel.integrations.registry import publish

NOT_OF_THE_STEP = frozenset({"epoch", "learning_rate"})
"""As they are after the step, in what is logged: the epoch is told as it was before, and the optimizer has its rate."""


class TorchotelCallback(TrainerCallback):
    """Tell of each step."""

    _epoch: float | None = None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note the epoch: after the last step of one, the next counts."""
        self._epoch = getattr(state, "epoch", None)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Tell the epoch and the step."""
        publish(lambda: {"epoch": self._epoch, "global_step": state.global_step})

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, object] | None = None,
        **kwargs: Any,
    ) -> None:
        """Tell what is logged: the loss since the last time, the metrics of an evaluation."""
        publish(lambda: {name: value for name, value in (logs or {}).items() if name not in NOT_OF_THE_STEP})


def connect(trainer: ModuleType) -> Callable[[], None]:
    """Have each Trainer that is made from now on call back; return what ends that."""
    defaults = trainer.DEFAULT_CALLBACKS
    defaults.append(TorchotelCallback)
    return lambda: defaults.remove(TorchotelCallback)
