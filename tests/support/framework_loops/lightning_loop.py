"""Lightning's Trainer, from either package: both have the same classes, which are not interchangeable."""

from types import ModuleType
from typing import Any

import lightning.pytorch
import torch
from torch import Tensor

from support.framework_loops.model_and_data import BATCHES, EPOCHS, RATE, VALIDATION_BATCHES, Net, Setting, loader


def train(setting: Setting, package: ModuleType = lightning.pytorch) -> None:
    trainer = make(
        package,
        accumulate_grad_batches=setting.accumulate,
        gradient_clip_val=setting.clip,
        precision="bf16-mixed" if setting.bf16 else "32-true",
    )
    trainer.fit(module(package), loader(BATCHES), loader(VALIDATION_BATCHES))


def make(package: ModuleType = lightning.pytorch, **arguments: object) -> Any:
    """Return a Trainer that writes no files and shows no progress."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return package.Trainer(**{"max_epochs": EPOCHS, "accelerator": "cpu", "devices": 1, **quiet, **arguments})


def module(package: ModuleType = lightning.pytorch) -> Any:
    """Return a module that trains the net and stores the values that it logged."""

    class Classifier(package.LightningModule):  # type: ignore[name-defined, misc]  # of one of the two packages
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.losses: list[float] = []
            self.validation_losses: list[float] = []

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            loss: Tensor = self.net(**batch)["loss"]
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
            loss = self.net(**batch)["loss"]
            self.log("val_loss", loss)
            if not self.trainer.sanity_checking:
                self.validation_losses.append(loss.item())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=RATE)

    return Classifier()
