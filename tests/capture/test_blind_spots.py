"""What a trace can't show is told once, to those whose programs do it, and to nobody else."""

import logging
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from support.single_step_training import Model
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

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


def frozen(module: nn.Module) -> Any:
    return torch.jit.freeze(torch.jit.script(module.eval()))


def with_a_criterion(run: Callable[[Tensor], Any], parameters: Iterable[nn.Parameter]) -> None:
    criterion = nn.MSELoss()
    trained(lambda x: criterion(run(x), x), parameters)


def as_a_function(compile_it: Callable[[Any], Any]) -> None:
    model = net()
    trained(compile_it(model.forward), model.parameters())


def by_name() -> None:
    layer = nn.Linear(4, 4)
    trained(layer.forward, layer.parameters())


def by_name_with_a_criterion() -> None:
    layer = nn.Linear(4, 4)
    with_a_criterion(layer.forward, layer.parameters())


def compiled_with_a_criterion() -> None:
    model = net()
    with_a_criterion(torch.compile(model.forward, backend="eager"), model.parameters())


def by_turns() -> None:
    """Train one model by its call, and one by its forward's name."""
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    for _ in range(3):
        for run in (one, other.forward, other.forward, other.forward, other.forward):
            trained(run, [*one.parameters(), *other.parameters()])


def forwards_first() -> None:
    """Run backward for each batch when all have gone forward."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = [model(ROWS).sum() for _ in range(6)]
    for loss in losses:
        loss.backward()
        optimizer.step()


def gradients(of_rows: Callable[[Any], Any]) -> None:
    """Train by the gradients that torch.func gives."""
    model = net()
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(values: Any, x: Tensor) -> Any:
        return functional_call(model, values, (x,)).sum()

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        found = of_rows(grad(loss))(values, ROWS)
        for name, parameter in model.named_parameters():
            parameter.grad = found[name].reshape(-1, *parameter.shape).mean(0)
        optimizer.step()


def without_modules() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    trained(lambda x: x @ weight, [weight])


def in_inference() -> None:
    with torch.no_grad():
        vmap(net())(ROWS)


NO_FORWARD = "before it no module with parameters"
TOLD: dict[str, tuple[Program, str]] = {
    "vmap": (partial(in_a_forward, lambda m, x: vmap(m.a)(x)), "Linear `a` of Model runs inside a transform"),
    "vmap after a plain call": (partial(in_a_forward, lambda m, x: vmap(m.a)(m.a(x))), "Linear `a` of Model runs"),
    "scripted": (partial(in_a_model, torch.jit.script), "`1` of Sequential"),
    "traced": (partial(in_a_model, traced), "`1` of Sequential"),
    "frozen": (partial(in_a_model, frozen), "`1` of Sequential"),
    "exported": (partial(in_a_model, exported), "`1` of Sequential"),
    "a compiled function": (partial(as_a_function, partial(torch.compile, backend="eager")), NO_FORWARD),
    "a compiled function and a criterion": (compiled_with_a_criterion, NO_FORWARD),
    "forward by its name": (by_name, NO_FORWARD),
    "forward by its name and a criterion": (by_name_with_a_criterion, NO_FORWARD),
    "no modules": (without_modules, NO_FORWARD),
}
SEEN: dict[str, Program] = {
    "layers": partial(in_a_model, lambda module: module),
    "functional_call": partial(in_a_forward, lambda m, x: functional_call(m.a, dict(m.b.named_parameters()), (x,))),
    "gradients of a model": partial(gradients, lambda run: run),
    "gradients of each row": partial(gradients, lambda run: vmap(run, (None, 0))),
    "unflattened": partial(in_a_model, unflattened),
    "a scripted layer": partial(in_a_model, lambda _: torch.jit.script(nn.Tanh())),
    "an exported layer": partial(in_a_model, lambda _: exported(nn.Linear(4, 4))),
    "traced by FX": partial(in_a_model, torch.fx.symbolic_trace),
    "a model and a function by turns": by_turns,
    "forwards first": forwards_first,
    "compiled": partial(in_a_model, partial(torch.compile, backend="eager")),
    "forward of layers by its name": partial(as_a_function, lambda run: run),
    "vmap in inference": in_inference,
    "vmap of what is frozen": partial(
        in_a_forward, lambda m, x: m.b(x) + vmap(m.a.requires_grad_(requires_grad=False))(x)
    ),
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


def test_patterns_that_match_nothing_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """Once, with a path that one would have to match."""
    with capture(include=["layer"]):
        in_a_model(lambda module: module)
        in_a_model(lambda module: module)
    (message,) = caplog.messages
    assert "`include` matches none" in message
    assert "Linear `0` of Sequential" in message


@pytest.mark.parametrize(
    ("settings", "make"),
    [
        ({"include": ["1"]}, lambda module: module),
        ({"include": ["1.*"]}, partial(torch.compile, backend="eager")),
        ({"include": ["Sequential"], "max_depth": 0}, lambda module: module),
        ({"exclude": ["*"]}, lambda module: module),
    ],
    ids=["one", "one in a compiled region", "the root alone", "metrics alone"],
)
def test_patterns_that_do_what_they_say_are_not_told_of(
    settings: dict[str, Any], make: Callable[[nn.Module], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Nor are evaluations of another model before the training of the one that is meant."""
    torch.compiler.reset()
    other = nn.Tanh()
    with capture(**settings):
        for _ in range(5):
            with torch.no_grad():
                other(ROWS)
        in_a_model(make)
        in_a_model(make)
    assert [record for record in caplog.records if record.name == "torchotel"] == []


def test_a_handler_of_the_users_may_raise() -> None:
    """It costs nothing but the message."""

    def fail(_: logging.LogRecord) -> bool:
        raise RuntimeError

    logger = logging.getLogger("torchotel")
    logger.addFilter(fail)
    try:
        with capture() as captured:
            in_a_model(traced)
    finally:
        logger.removeFilter(fail)
    assert [len(step.find_all("forward 1")) for step in captured.steps] == [1, 1, 1]
    assert captured.handle.stats()["internal_errors"] == 0


def test_one_step_without_a_forward_is_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """It may have run before `instrument()`."""
    loss = net()(ROWS).sum()
    assert told(loss.backward, caplog) == []


def test_more_calls_than_are_kept(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted, and told of once."""
    monkeypatch.setattr("torchotel.capture.root_calls.MAX_STEP_CALLS", 4)
    with capture() as captured, torch.enable_grad():
        layer = nn.Linear(4, 4)
        for _ in range(9):
            layer(ROWS)
    messages = [record.getMessage() for record in caplog.records if record.name == "torchotel"]
    assert len(messages) == 1
    assert "more than 4 module calls" in messages[0]
    assert captured.handle.stats()["calls_dropped"] == 5
