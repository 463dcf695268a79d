"""Graphs run backward in unusual ways: twice, in part, for a gradient that is used further, of several losses."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.functional import hvp, jacobian
from torch.autograd.grad_mode import set_multithreading_enabled
from torch.autograd.graph import allow_mutation_on_saved_tensors, get_gradient_edge

from fidelity.forward_subjects import model_of
from fidelity.layer_subjects import subject
from fidelity.subjects import Subject, loss_of

Run = Callable[[Any, Tensor], tuple[Any, Tensor]]
"""Runs a model forward and backward; gives its output and the loss."""


def subjects() -> Iterator[Subject]:
    """Yield all of them."""
    for name, run in {**_once(), **_again(), **_further()}.items():
        yield _of(name, run)
    in_two = partial(model_of, lambda m, x: (hidden := m.a(x), m.b(hidden.tanh())))
    yield subject("backward runs", "cut at an edge", in_two, loop=partial(trained, _cut))


def entered_in_the_midst() -> Iterator[Subject]:
    """Yield those whose second run enters the graph of the first without passing a module's outputs."""
    for name, run in {"for a product with the Hessian": _curvature, "for a Jacobian": _rates}.items():
        yield _of(name, run)


def _of(name: str, run: Run) -> Subject:
    smooth = partial(model_of, lambda m, x: m.b[0](m.a(x).tanh()))
    return subject("backward runs", name, smooth, loop=partial(trained, run))


def trained(run: Run, model: nn.Module, x: Tensor) -> Iterator[tuple[Any, Tensor]]:
    """Train two steps with Adam."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        yield run(model, x)
        optimizer.step()


def _once() -> dict[str, Run]:
    def within(make: Callable[[], AbstractContextManager[Any]]) -> Run:
        def run(m: Any, x: Tensor) -> tuple[Any, Tensor]:
            with make():
                y = m(x)
                loss = loss_of(y)
                loss.backward()
            return y, loss

        return run

    def of_several(m: Any, x: Tensor) -> tuple[Any, Tensor]:
        y, z = m(x), m.choices.left(x)
        torch.autograd.backward([y, z], [torch.ones_like(y), torch.full_like(z, 2)])
        return y, y.mean()

    def by_hand(m: Any, x: Tensor) -> tuple[Any, Tensor]:
        y = m(x)
        loss = loss_of(y)
        wanted = [parameter for parameter in m.parameters() if parameter.requires_grad]
        for parameter, gradient in zip(wanted, torch.autograd.grad(loss, wanted, allow_unused=True), strict=True):
            parameter.grad = gradient
        return y, loss

    return {
        "plainly": within(nullcontext),
        "in anomaly mode": within(torch.autograd.detect_anomaly),
        "on one thread": within(lambda: set_multithreading_enabled(mode=False)),
        "with saved tensors that may change": within(allow_mutation_on_saved_tensors),
        "from several tensors": of_several,
        "for the gradients alone": by_hand,
    }


def _again() -> dict[str, Run]:
    def twice(m: Any, x: Tensor) -> tuple[Any, Tensor]:
        y = m(x)
        loss = loss_of(y)
        loss.backward(retain_graph=True)
        loss.backward()
        return y, loss

    def in_parts(m: Any, x: Tensor) -> tuple[Any, Tensor]:
        y = m(x)
        loss = loss_of(y)
        loss.backward(inputs=list(m.b.parameters()), retain_graph=True)
        loss.backward(inputs=list(m.a.parameters()))
        return y, loss

    return {"twice": twice, "in parts": in_parts}


def _further() -> dict[str, Run]:
    def penalty(m: Any, x: Tensor) -> tuple[Any, Tensor]:
        x = x.clone().requires_grad_()
        y = m(x)
        loss = loss_of(y)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + (gradient.norm(dim=1) - 1).square().mean()
        loss.backward()
        return y, loss

    def all_rows(m: Any, x: Tensor) -> tuple[Any, Tensor]:
        y = m(x.requires_grad_())
        ways = torch.eye(3)[:, :, None].expand(-1, -1, y.shape[1])
        (rows,) = torch.autograd.grad(y, x, ways, is_grads_batched=True, create_graph=True)
        loss = loss_of([y, rows])
        loss.backward()
        return y, loss

    return {
        "for a penalty on a gradient": penalty,
        "for a batch of gradients": all_rows,
    }


def _cut(m: Any, x: Tensor) -> tuple[Any, Tensor]:
    hidden, y = m(x)
    loss = loss_of(y)
    (gradient,) = torch.autograd.grad(loss, [get_gradient_edge(hidden)], retain_graph=True)
    loss.backward(inputs=list(m.b.parameters()))
    hidden.backward(gradient)
    return y, loss


def _curvature(m: Any, x: Tensor) -> tuple[Any, Tensor]:
    value, product = hvp(lambda x: loss_of(m(x)), x, torch.ones_like(x), create_graph=True)
    loss = value + product.square().sum()
    loss.backward()
    return value, loss


def _rates(m: Any, x: Tensor) -> tuple[Any, Tensor]:
    rates = jacobian(m, x[0], create_graph=True)
    loss = loss_of(rates)
    loss.backward()
    return rates, loss
