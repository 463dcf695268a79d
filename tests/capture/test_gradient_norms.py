"""Gradient norms: of which parameters, and in which steps."""

import math
from typing import Any

import pytest
import torch
from fidelity.norms import true_norm
from support.gradient_norm_training import ROWS, captured, gradient_norm, loss_of, net, trained
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


def test_norms_by_module_and_in_total() -> None:
    """Each module has the norm of its own parameters, in the order of the model; the total is over all."""
    model = net()
    with captured() as (seen, _):
        true = trained(model, steps=1)
        own = [true_norm(p.grad for p in layer.parameters()) for layer in (model[0], model[2])]
    (norms,) = seen.norms
    assert norms is not None
    assert norms.total == pytest.approx(true[0], rel=1e-6)
    assert [value for _, value in norms.modules] == pytest.approx(own, rel=1e-6)
    assert [(info.model, info.path, info.type) for info, _ in norms.modules] == [
        ("Sequential", "0", "Linear"),
        ("Sequential", "2", "Linear"),
    ]


@pytest.mark.parametrize(
    ("gradient_norms", "detail", "expected"),
    [
        ("auto", 3, [True, False, False, True, False]),
        ("auto", "off", [False] * 5),
        (True, "off", [True] * 5),
        (2, "all", [True, False, True, False, True]),
        (False, "all", [False] * 5),
    ],
)
def test_in_which_steps(gradient_norms: Any, detail: Any, expected: list[bool]) -> None:
    """The setting says in which steps they are taken; by default that is the detailed ones."""
    with captured(gradient_norms=gradient_norms, detail=detail) as (seen, _):
        trained(net(), steps=5)
    assert [norms is not None for norms in seen.norms] == expected


def test_tied_weights_count_once() -> None:
    """A weight that two modules hold is the first one's, and counts once in the total."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    with captured() as (seen, _):
        true = trained(model, steps=1)
    assert seen.totals == pytest.approx(true, rel=1e-6)
    assert seen.paths == [["0"]]


def test_frozen_parameters_are_left_out() -> None:
    """A frozen layer has no norm, even where an old gradient still stands on it."""
    model = net()
    loss_of(model).backward()
    model[0].requires_grad_(requires_grad=False)
    model[2].zero_grad()
    with captured() as (seen, _):
        loss_of(model).backward()
        torch.optim.SGD(model[2].parameters(), 0.1).step()
    assert model[0].weight.grad is not None
    assert seen.paths == [["2"]]
    assert seen.totals == pytest.approx([gradient_norm(model[2])], rel=1e-6)


def test_two_models_in_a_step() -> None:
    """A GAN's step has the norms that each optimizer got, not what the generator's backward adds to the critic."""
    generator, critic = net(), nn.Sequential(nn.Linear(2, 1))
    optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in (critic, generator)]
    true = []
    with captured() as (seen, _):
        for (batch,) in DataLoader(TensorDataset(torch.randn(12, 4)), batch_size=4):
            fake = generator(batch)
            critic(fake.detach()).mean().backward()
            critics = gradient_norm(critic)
            optimizers[0].step()
            generator.zero_grad()
            (-critic(fake).mean()).backward()
            true.append(math.hypot(critics, gradient_norm(generator)))
            optimizers[1].step()
            critic.zero_grad()
    assert seen.totals == pytest.approx(true, rel=1e-6)
    assert {info.path for norms in seen.norms if norms for info, _ in norms.modules} == {"0", "2"}
    assert {info.model for norms in seen.norms if norms for info, _ in norms.modules} == {"Sequential", "Sequential-2"}


def test_a_root_that_is_never_called() -> None:
    """The model counts as a whole where only its parts are called, as in Lightning."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
            self.scale = nn.Parameter(torch.ones(()))

    with captured() as (seen, _):
        whole = Whole()
        (whole.head(whole.encoder(ROWS)) * whole.scale).sum().backward()
        torch.optim.SGD(whole.parameters(), 0.1).step()
    assert seen.totals == pytest.approx([gradient_norm(whole)], rel=1e-6)
    assert seen.paths == [["Whole", "encoder", "head"]]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("detail", ["off", "all"])
def test_compiled_models(in_place: bool, detail: str) -> None:  # noqa: FBT001  # a parameter of the test
    """A compiled model's norms have the names of the model inside."""
    with captured(detail=detail) as (seen, _):
        model = net()
        compiled: Any = model if in_place else torch.compile(model, backend="eager")
        if in_place:
            model.compile(backend="eager")
        true = trained(compiled)
    assert seen.totals == pytest.approx(true, rel=1e-6)
    assert seen.paths == [["0", "2"]] * 3


def test_evaluations_have_none() -> None:
    """A model that ran without gradients is no part of the step, even with old gradients on it."""
    teacher, model = net(), net()
    teacher(ROWS).sum().backward()

    def distillation(model: nn.Module) -> Tensor:
        output = model(ROWS)
        with torch.no_grad():
            target = teacher(ROWS)
        return functional.mse_loss(output, target)

    with captured() as (seen, _):
        trained(model, steps=1, loss=distillation)
    assert seen.totals == pytest.approx([gradient_norm(model)], rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite(bad: float) -> None:
    """A gradient that is not finite is told, and by whom; the others' norms stay what they are."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with captured() as (seen, _):
        loss_of(model).backward()
        optimizer.step()
        model.zero_grad()
        model[2].get_parameter("weight").register_hook(lambda gradient: gradient * bad)
        loss_of(model).backward()
        optimizer.step()
    before, after = ({info.path: value for info, value in norms.modules} for norms in seen.norms if norms)
    assert not math.isfinite(after["2"])
    assert not math.isfinite(seen.totals[1])
    assert after["0"] == before["0"]


def test_unsupported_gradients_are_left_out() -> None:
    """Where a gradient's norm can't be known there are none, and nothing fails."""
    model = net().to("meta")
    with captured() as (seen, _):
        model(ROWS.to("meta")).sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    assert seen.norms == [None]
