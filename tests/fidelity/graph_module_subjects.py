"""Models that left Python: traced and scripted ones, exported ones, and the graphs that FX makes."""

import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, export

from fidelity.forward_subjects import linear
from fidelity.layer_subjects import SIDE, Applied, subject
from fidelity.subjects import Subject

Make = Callable[[nn.Module], nn.Module]


class Branching(nn.Module):
    """Has a branch that scripting keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = linear(), nn.BatchNorm1d(SIDE), linear()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.first(x)))
        if x.size(0) > 2:
            y = y * 2
        out: Tensor = self.last(y)
        return out


def subjects() -> Iterator[Subject]:
    """Yield all of them, alone and as a part of an eager model."""
    for name, make in _ways().items():
        yield subject("traced, scripted, exported", name, partial(_made, make))
        yield subject("traced, scripted, exported in an eager model", name, partial(_part, make))
    for name, make in _frozen().items():  # nothing of their own is left to train
        yield subject("traced, scripted, exported in an eager model", name, partial(_part, make))


def _made(make: Make) -> nn.Module:
    torch.manual_seed(2)
    return make(Branching())


def _part(make: Make) -> nn.Module:
    return Applied(lambda m, x: m.after(m.part(m.before(x))), part=_made(make), before=linear(), after=linear())


def _ways() -> dict[str, Make]:
    example = torch.ones(3, SIDE)
    return {
        "traced": lambda model: torch.jit.trace(model, example, check_trace=False),
        "scripted": torch.jit.script,
        "scripted in part": _scripted_in_part,
        "traced by FX": lambda model: fx.symbolic_trace(nn.Sequential(*model.children())),
        "exported": lambda model: _unlifted(export(model, (example,))),
        "exported strictly": lambda model: _unlifted(export(model, (example,), strict=True)),
        "exported, stored and loaded": lambda model: _unlifted(_stored(export(model, (example,)))),
        "exported with dynamic shapes": _dynamic,
        "unflattened": lambda model: torch.export.unflatten(export(model, (example,))),
    }


def _frozen() -> dict[str, Make]:
    return {
        "frozen": lambda model: torch.jit.freeze(torch.jit.script(model.eval())),
        "frozen, stored and loaded": lambda model: _reloaded(torch.jit.freeze(torch.jit.script(model.eval()))),
        "optimized for inference": lambda model: torch.jit.optimize_for_inference(torch.jit.script(model.eval())),
    }


def _reloaded(script: torch.jit.ScriptModule) -> nn.Module:
    file = io.BytesIO()
    torch.jit.save(script, file)
    file.seek(0)
    loaded: nn.Module = torch.jit.load(file)
    return loaded


def _scripted_in_part(model: nn.Module) -> nn.Module:
    model.norm = torch.jit.script(cast("nn.Module", model.norm))
    return model


def _dynamic(model: nn.Module) -> nn.Module:
    shapes = ({0: Dim("rows", min=3)},)
    return _unlifted(export(model, (torch.ones(5, SIDE),), dynamic_shapes=shapes))


def _stored(program: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


def _unlifted(program: ExportedProgram) -> nn.Module:
    """Give the module of a program; it is in training, and PyTorch lets nobody say so."""
    model = program.module()
    vars(model)["train"] = lambda *_: model
    return model
