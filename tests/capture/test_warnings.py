"""What a trace can't show is told once, to those whose programs do it, and to nobody else."""

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from training import Model

from torchotel.testing import capture

ROWS = torch.ones(2, 4)
Forward = Callable[[Any, Tensor], Tensor]
Program = Callable[[], None]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def trained(run: Callable[[Tensor], Any], parameters: Iterable[nn.Parameter]) -> None:
    optimizer = torch.optim.SGD(parameters, 0.1)
    for _ in range(3):
        run(ROWS).sum().backward()
        optimizer.step()


def in_a_forward(forward: Forward) -> None:
    """Train a model of this forward."""
    model = Model(forward)
    trained(model, model.parameters())


def in_a_model(make: Callable[[nn.Module], Any]) -> None:
    """Train a model that holds what is made of layers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch says of scripts that they are deprecated
        model = nn.Sequential(nn.Linear(4, 4), make(net()))
    trained(model, model.parameters())


def exported(module: nn.Module) -> Any:
    return torch.export.export(module, (ROWS,)).module()


def unflattened(module: nn.Module) -> Any:
    return torch.export.unflatten(torch.export.export(module, (ROWS,)))


def traced(module: nn.Module) -> Any:
    return torch.jit.trace(module, ROWS)


def as_a_function(compile_it: Callable[[Any], Any]) -> None:
    model = net()
    trained(compile_it(model.forward), model.parameters())


def by_name() -> None:
    layer = nn.Linear(4, 4)
    trained(layer.forward, layer.parameters())


def without_modules() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    trained(lambda x: x @ weight, [weight])


def in_inference() -> None:
    with torch.no_grad():
        vmap(net())(ROWS)


TOLD: dict[str, tuple[Program, str]] = {
    "vmap": (partial(in_a_forward, lambda m, x: vmap(m.a)(x)), "a is called inside a transform"),
    "grad": (partial(in_a_forward, lambda m, x: grad(lambda x: m.a(x).sum())(x)), "a is called inside a transform"),
    "scripted": (partial(in_a_model, torch.jit.script), "1 was scripted, traced or exported: it is one span"),
    "traced": (partial(in_a_model, traced), "1 was scripted, traced or exported: it is one span"),
    "exported": (partial(in_a_model, exported), "1 was scripted, traced or exported: it is one span"),
    "a compiled function": (partial(as_a_function, partial(torch.compile, backend="eager")), "call no module"),
    "forward by its name": (by_name, "call no module"),
    "no modules": (without_modules, "call no module"),
}
SEEN: dict[str, Program] = {
    "layers": partial(in_a_model, lambda module: module),
    "functional_call": partial(in_a_forward, lambda m, x: functional_call(m.a, dict(m.b.named_parameters()), (x,))),
    "unflattened": partial(in_a_model, unflattened),
    "a scripted layer": partial(in_a_model, lambda _: torch.jit.script(nn.Tanh())),
    "compiled": partial(in_a_model, partial(torch.compile, backend="eager")),
    "forward of layers by its name": partial(as_a_function, lambda run: run),
    "vmap in inference": in_inference,
}


def told(program: Program, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Run a program and give what torchotel logged."""
    torch.compiler.reset()
    with capture() as captured:
        program()
    assert captured.handle.stats()["internal_errors"] == 0
    return [record.getMessage() for record in caplog.records if record.name == "torchotel"]


@pytest.mark.parametrize("name", TOLD)
def test_what_is_not_seen_is_told_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The first step that has it tells which module it is, or what to do."""
    program, text = TOLD[name]
    (message,) = told(program, caplog)
    assert text in message


@pytest.mark.parametrize("name", SEEN)
def test_what_is_seen_is_not_told_of(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody is warned of what is complete."""
    assert told(SEEN[name], caplog) == []


def test_one_step_without_a_forward_is_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """It may have run before `instrument()`."""
    loss = net()(ROWS).sum()
    assert told(loss.backward, caplog) == []


def test_more_calls_than_are_kept(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted, and told of once."""
    monkeypatch.setattr("torchotel.capture.outermost.MOST_CALLS", 4)
    with capture() as captured, torch.enable_grad():
        layer = nn.Linear(4, 4)
        for _ in range(9):
            layer(ROWS)
    messages = [record.getMessage() for record in caplog.records if record.name == "torchotel"]
    assert len(messages) == 1
    assert "more than 4 module calls" in messages[0]
    assert captured.handle.stats()["calls_dropped"] == 5
