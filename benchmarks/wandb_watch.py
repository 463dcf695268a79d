"""`wandb.watch`, if it is installed: histograms of all gradients, into an offline run."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.interleave import Mode, Running

NAME = "wandb.watch, every step"


@contextmanager
def wandb_modes(model: nn.Module) -> Iterator[list[Mode]]:
    """Yield the mode if wandb is installed."""
    spec = importlib.util.find_spec("wandb")
    if spec is None or spec.origin is None:  # not installed, or only a folder of that name
        yield []
        return
    wandb = importlib.import_module("wandb")
    with TemporaryDirectory() as folder:
        run = wandb.init(mode="offline", dir=folder, settings=wandb.Settings(silent=True, console="off"))
        yield [Mode(NAME, lambda: _watched(run, model))]
        run.finish()


@contextmanager
def _watched(run: Any, model: nn.Module) -> Iterator[Running]:
    run.watch(model, log="gradients", log_freq=1)
    handle = register_optimizer_step_post_hook(lambda *_: run.log({}))
    yield Running()
    handle.remove()
    run.unwatch(model)
