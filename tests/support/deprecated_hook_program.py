"""Train with the deprecated global backward hook, in a process that never saw a full one; print what it saw."""

import sys
import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_backward_hook

import torchotel


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")


def note(module: nn.Module, grad_input: Any, grad_output: Any) -> tuple[torch.Tensor | None, ...]:
    """Print the gradients' shapes and sums, and halve those of the inputs."""
    gradients = [(tuple(g.shape), g.sum().item()) for g in (*grad_input, *grad_output) if g is not None]
    say(type(module).__name__, gradients)
    return tuple(None if g is None else g / 2 for g in grad_input)


def train() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Sigmoid(), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        loss = net(torch.randn(3, 4)).square().mean()
        loss.backward()
        optimizer.step()
        say("loss", loss.item())


how = sys.argv[1]
warnings.simplefilter("ignore")
if how == "after":
    torchotel.instrument(traces_exporter="none", record=how, detail="all")
register_module_backward_hook(note)
if how == "before":
    torchotel.instrument(traces_exporter="none", record=how, detail="all")
train()
torchotel.uninstrument()
