"""torch.func: modules called as functions of their parameters, and functions transformed."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)

from fidelity.forward_subjects import Forward, model_of
from fidelity.layer_subjects import SIDE, subject
from fidelity.run_subjects import Run, trained
from fidelity.subjects import Subject, loss_of


def subjects() -> Iterator[Subject]:
    """Yield those whose graphs can be seen."""
    for name, run in _called().items():
        yield subject("torch.func, in a forward", name, partial(model_of, run))
    plain = partial(model_of, lambda m, x: m.b[0](m.a(x).tanh()))
    for name, loop in _loops().items():
        yield subject("torch.func, around a model", name, plain, loop=partial(trained, loop))


def beyond() -> Iterator[Subject]:
    """Yield those whose graphs are torch.func's own, as far as they lie inside of what it transforms."""
    for name, run in _transformed().items():
        yield subject("torch.func, in a forward", name, partial(model_of, run))


def _smooth(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.choices.left(m.a(x).tanh())
    return y


def _called() -> dict[str, Forward]:
    return {
        "functional_call": lambda m, x: functional_call(m.a, {"weight": torch.eye(SIDE)}, (m.choices.left(x),)),
        "functional_call, tied": lambda m, x: functional_call(m.b[0], dict(m.a.named_parameters()), (m.a(x),)),
    }


def _transformed() -> dict[str, Forward]:
    return {
        "vmap": lambda m, x: vmap(partial(_smooth, m))(x),
        "vmap, with random numbers": lambda m, x: vmap(lambda x: m.b[2](m.a(x)), randomness="different")(x),
        "grad": lambda m, x: m.choices.left(grad(lambda x: m.a(x).square().sum())(x)),
        "vjp": lambda m, x: vjp(partial(_smooth, m), x)[1](torch.ones_like(x)),
        "jvp": lambda m, x: jvp(partial(_smooth, m), (x,), (torch.ones_like(x),)),
        "jacrev": lambda m, x: jacrev(partial(_smooth, m))(x[0]),
        "jacfwd": lambda m, x: jacfwd(partial(_smooth, m))(x[0]),
        "hessian": lambda m, x: hessian(lambda x: _smooth(m, x).sum())(x[0]),
        "gradients of each row": lambda m, x: vmap(grad(lambda x: _smooth(m, x).sum()))(x),
        "an ensemble": _ensemble,
    }


def _ensemble(m: Any, x: Tensor) -> Any:
    layers = [m.a, m.choices.left, m.b[0]]
    parameters, buffers = stack_module_state(layers)
    base = nn.Linear(SIDE, SIDE).to("meta")

    def one(parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], x: Tensor) -> Any:
        return functional_call(base, (dict(parameters), dict(buffers)), (x,))

    return m.a(x), vmap(one, (0, 0, None))(parameters, buffers, x)


def _loops() -> dict[str, Run]:
    def by_grad(m: Any, x: Tensor) -> tuple[Any, Tensor]:
        values = {name: value.detach() for name, value in m.named_parameters()}

        def loss_with(values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            y: Tensor = functional_call(m, dict(values), (x,))
            return loss_of(y), y

        gradients, (loss, y) = grad_and_value(loss_with, has_aux=True)(values)
        for name, parameter in m.named_parameters():
            parameter.grad = gradients[name]
        return y, loss

    def of_each_row(m: Any, x: Tensor) -> tuple[Any, Tensor]:
        values = {name: value.detach() for name, value in m.named_parameters()}

        def loss_with(values: Mapping[str, Tensor], row: Tensor) -> Tensor:
            return loss_of(functional_call(m, dict(values), (row[None],)))

        gradients = vmap(grad(loss_with), (None, 0))(values, x)
        for name, parameter in m.named_parameters():
            parameter.grad = gradients[name].mean(0)
        return gradients["a.weight"], gradients["a.weight"].mean()

    return {"grad of its parameters": by_grad, "gradients of each row": of_each_row}
