"""The leak check around every test: nothing of ours is left behind."""

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.utils.data.dataloader as data_loader
from receiver import Receiver, receiver
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as torch_optimizer

import torchotel


def _global_state() -> dict[str, object]:
    """Give every dictionary of global hooks and every attribute that torchotel replaces."""
    hooks = {
        f"{owner.__name__}.{name}": dict(value)
        for owner in (nn_module, torch_optimizer)
        for name, value in vars(owner).items()
        if name.startswith("_global") and isinstance(value, dict)
    }
    replaced: dict[str, object] = {
        "backward": vars(torch.autograd)["_engine_run_backward"],
        "next": data_loader._BaseDataLoaderIter.__next__,
        "iter": data_loader.DataLoader.__iter__,
        "scaler": torch.amp.GradScaler.step,
        "compile": torch.nn.Module.compile,
    }
    return {**hooks, **replaced}


def _our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("torchotel")]


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Compare hooks, patches and threads with what was there before."""
    torch.manual_seed(0)
    before = _global_state()
    yield
    torchotel.uninstrument()
    assert _global_state() == before
    for thread in threading.enumerate():
        if thread.name.startswith("torchotel"):
            thread.join(5)
    assert _our_threads() == []


@pytest.fixture
def server() -> Iterator[Receiver]:
    """Run a receiver."""
    with receiver() as running:
        yield running
