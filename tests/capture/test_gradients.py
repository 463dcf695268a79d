"""Gradient norms: of which parameters, of which backward, in which steps."""

import math
import weakref
from typing import Any

import pytest
import torch
from fidelity.norms import true_norm
from gradient_norms import ROWS, Operations, captured, gradient_norm, loss_of, net, trained
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode


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
    """A GAN's step has the norms of both networks, the generator's also where it ran before the other's step."""
    generator, critic = net(), nn.Sequential(nn.Linear(2, 1))
    optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in (critic, generator)]
    true = []
    with captured() as (seen, _):
        for (batch,) in DataLoader(TensorDataset(torch.randn(12, 4)), batch_size=4):
            fake = generator(batch)
            critic(fake.detach()).mean().backward()
            optimizers[0].step()
            generator.zero_grad()
            (-critic(fake).mean()).backward()
            true.append(gradient_norm(generator, critic))
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


def test_autograd_grad_takes_none() -> None:
    """`torch.autograd.grad` leaves no gradient, so the norms are those of the backward."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with captured() as (seen, _):
        loss_of(model).backward()
        true = gradient_norm(model)
        for parameter in model.parameters():
            parameter.grad.mul_(1000)  # type: ignore[union-attr]  # the backward has set it
        torch.autograd.grad(loss_of(model), list(model.parameters()))
        optimizer.step()
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
    """It takes no norms, though some parameters have a gradient, and the next step has its own."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with captured() as (seen, _):
        hook = model[0].get_parameter("weight").register_hook(_refuse)
        with pytest.raises(ValueError, match="refused"):
            loss_of(model).backward()
        assert model[2].get_parameter("weight").grad is not None
        optimizer.step()
        hook.remove()
        loss_of(model).backward()
        true = gradient_norm(model)
        optimizer.step()
    assert seen.norms[0] is None
    assert seen.totals == pytest.approx([true], rel=1e-6)


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
    """A model that needs a gradient for its output leaves no norms by that."""

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
        torch.optim.SGD(model.parameters(), 0.1).step()
    assert gradient_norm(model) > 0
    assert seen.norms == [None]


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


def _everything(model: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.Adam(model.parameters())
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().sum().backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return [*found, *(p.detach() for p in model.parameters()), torch.get_rng_state()]


def test_nothing_changes() -> None:
    """Gradients, parameters and the random numbers are bit for bit what they are without."""

    def run() -> list[Tensor]:
        torch.manual_seed(3)
        return _everything(nn.Sequential(net(), nn.Dropout(0.5)))

    plain = run()
    with captured() as (seen, _):
        observed = run()
    assert len(seen.totals) == 3
    assert all(torch.equal(a, b) for a, b in zip(plain, observed, strict=True))


def test_modes_do_not_see_it() -> None:
    """A counter of operations counts the user's alone."""

    def flops_and_operations(count: FlopCounterMode) -> tuple[int, int]:
        with count, Operations() as operations:
            loss_of(model).backward()
        return count.get_total_flops(), operations.seen

    model = net()
    plain = flops_and_operations(FlopCounterMode(display=False))
    model.zero_grad()
    with captured() as (seen, _):
        observed = flops_and_operations(FlopCounterMode(display=False))
    assert len(seen.totals) == 1
    assert observed == plain


def test_nothing_is_kept() -> None:
    """Neither gradients nor the model live on for it."""
    model = net()
    with captured() as (seen, capture):
        trained(model, steps=1)
        dead = [weakref.ref(p.grad) for p in model.parameters()]
        model.zero_grad()
        assert [ref() for ref in dead] == [None] * 4
        gone = weakref.ref(model)
        del model
        assert gone() is None
        capture.flush()
    assert len(seen.totals) == 1


def test_unsupported_gradients_are_left_out() -> None:
    """Where a gradient's norm can't be known there are none, and nothing fails."""
    model = net().to("meta")
    with captured() as (seen, _):
        model(ROWS.to("meta")).sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    assert seen.norms == [None]
