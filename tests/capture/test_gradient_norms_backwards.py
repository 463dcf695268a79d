"""Gradient norms: of which backward, where there are several, one in another, or one that raises."""

from typing import Any

import pytest
import torch
from support.gradient_norm_training import ROWS, captured, gradient_norm, loss_of, net, trained
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def test_accumulation_counts_once() -> None:
    """Of several backwards of a step the last one's norms are the step's: the gradients are summed there."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    true = []
    with captured() as (seen, _):
        for _ in range(2):
            for scale in (1, 2, 3):
                (loss_of(model) * scale).backward()
            true.append(gradient_norm(model))
            optimizer.step()
            optimizer.zero_grad()
    assert seen.totals == pytest.approx(true, rel=1e-6)


def test_clipping_comes_after() -> None:
    """The norms are those before clipping."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with captured() as (seen, _):
        loss_of(model).backward()
        true = gradient_norm(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
    assert true > 1
    assert seen.totals == pytest.approx([true], rel=1e-6)


def test_closures() -> None:
    """With a closure the norms are those of its last backward, not of the step before."""
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    true: list[float] = []

    def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        true.append(gradient_norm(model))
        return loss

    last = []
    with captured() as (seen, _):
        for _ in range(3):
            optimizer.step(closure)
            last.append(true[-1])
    assert seen.totals == pytest.approx(last, rel=1e-6)


def test_lightnings_closure() -> None:
    """Lightning runs zero_grad, forward and backward inside `SGD.step(closure)`: the norms are of that step."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    true = []

    def closure() -> Any:
        loss = loss_of(model)
        optimizer.zero_grad()
        loss.backward()
        true.append(gradient_norm(model))
        return loss

    with captured() as (seen, _):
        for _ in range(3):
            optimizer.step(closure)
    assert len(true) == 3
    assert seen.totals == pytest.approx(true, rel=1e-6)


class Thrifty(nn.Module):
    """Runs its body again in the backward."""

    def __init__(self, body: nn.Module, stem: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.stem, self.body, self.reentrant = stem, body, reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.body, self.stem(x), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:  # noqa: FBT001  # a parameter of the test
    """What runs again inside a backward takes no norms: those at the end of the outermost count."""
    with captured(detail="all") as (seen, _):
        true = trained(Thrifty(net(), nn.Linear(4, 4), reentrant=reentrant))
    assert seen.totals == pytest.approx(true, rel=1e-6)
    assert seen.paths == [["stem", "body.0", "body.2"]] * 3


def test_autograd_grad_takes_none() -> None:
    """`torch.autograd.grad` leaves no gradient, so the norms are those of the backward where no optimizer steps."""
    model = net()
    with captured() as (seen, _):
        loss_of(model).backward()
        true = gradient_norm(model)
        for parameter in model.parameters():
            parameter.grad.mul_(1000)  # type: ignore[union-attr]  # the backward has set it
        torch.autograd.grad(loss_of(model), list(model.parameters()))
    assert seen.totals == pytest.approx([true], rel=1e-6)


def test_a_penalty_on_the_gradient() -> None:
    """A double backward's norms are those of what ends up in `grad`."""
    model = net()

    def loss(model: nn.Module) -> Tensor:
        value = loss_of(model)
        penalty = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
        return value + sum(gradient.square().sum() for gradient in penalty)

    with captured() as (seen, _):
        true = trained(model, loss=loss)
    assert seen.totals == pytest.approx(true, rel=1e-6)


def test_create_graph_and_retain_graph() -> None:
    """Gradients that are part of a graph are read outside of it."""
    model = net()
    with captured() as (seen, _):
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        with pytest.warns(UserWarning, match="create_graph=True"):
            loss.backward(create_graph=True)
        true = gradient_norm(model)
        torch.optim.SGD(model.parameters(), 0.1).step()
    model.zero_grad()
    assert seen.totals == pytest.approx([true], rel=1e-6)


def _refuse(_: Tensor) -> Tensor:
    raise ValueError("refused")


def test_a_backward_that_raises() -> None:
    """What it left is known where an optimizer gets it, and the next step has its own norms."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with captured() as (seen, _):
        hook = model[0].get_parameter("weight").register_hook(_refuse)
        with pytest.raises(ValueError, match="refused"):
            loss_of(model).backward()
        assert model[2].get_parameter("weight").grad is not None
        true = [gradient_norm(model)]
        optimizer.step()
        hook.remove()
        loss_of(model).backward()
        true.append(gradient_norm(model))
        optimizer.step()
    assert seen.totals == pytest.approx(true, rel=1e-6)


def test_a_backward_inside_one_that_raises() -> None:
    """The end of an inner backward is not the end of the outermost."""
    model = net()
    x = ROWS.clone().requires_grad_()
    x.register_hook(_refuse)
    with captured() as (seen, _):
        with pytest.raises(ValueError, match="refused"):
            Thrifty(model, nn.Identity(), reentrant=True)(x).sum().backward()
        assert model[0].get_parameter("weight").grad is not None
        torch.optim.SGD(model.parameters(), 0.1).step()
    assert seen.norms == [None]


def test_a_backward_inside_a_forward() -> None:
    """A model that needs a gradient for its output leaves gradients, whose norms count if an optimizer gets them."""

    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = net()

        def forward(self, x: Tensor) -> Any:
            place = x.clone().requires_grad_()
            self.energy(place).sum().backward()
            return place.grad

    model = Force()
    with captured() as (seen, _):
        model(ROWS)
        true = gradient_norm(model)
        torch.optim.SGD(model.parameters(), 0.1).step()
    assert true > 0
    assert seen.totals == pytest.approx([true], rel=1e-6)


def test_optimizers_in_the_backward() -> None:
    """Where each parameter is stepped as soon as it has its gradient, there is nothing left to take."""
    model = net()
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]  # it is one of the parameters
        optimizers[parameter].zero_grad()  # type: ignore[index]  # it is one of them

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    with captured() as (seen, _):
        for _ in range(2):
            loss_of(model).backward()
    assert seen.norms == [None, None]
