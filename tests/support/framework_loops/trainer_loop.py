"""Hugging Face's Trainer."""

from typing import Any

from torch import nn
from transformers import Trainer, TrainingArguments

from support.framework_loops.model_and_data import BATCHES, EPOCHS, RATE, VALIDATION_BATCHES, Net, Setting, rows

ROWS, VALIDATION = rows(BATCHES), rows(VALIDATION_BATCHES)


def make(setting: Setting, model: nn.Module | None = None, data: Any = ROWS, **arguments: Any) -> Trainer:
    """Return a Trainer that writes no files; further arguments are passed to TrainingArguments."""
    given: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "num_train_epochs": EPOCHS,
        "gradient_accumulation_steps": setting.accumulate,
        "learning_rate": RATE,
        "optim": "sgd",
        "max_grad_norm": setting.clip,
        "bf16": setting.bf16,
        "eval_strategy": "epoch",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "output_dir": ".",  # required, although nothing is saved
    }
    settings = TrainingArguments(**{**given, **arguments})
    return Trainer(model or Net(), settings, train_dataset=data, eval_dataset=VALIDATION)


def train(setting: Setting) -> None:
    make(setting).train()
