"""Gradient norms are those that the optimizer gets, before clipping: what changes gradients after a backward."""

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fidelity.norms import true_norm
from support.gradient_norm_training import Operations, captured, gradient_norm, loss_of, net
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

WORLD = 4


def divide_in_place(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= WORLD


def divide_anew(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad / WORLD


def replace_one_by_one(model: nn.Module) -> None:
    """Free each gradient before the new one is made, whose `id()` may then be that of the old one."""
    for parameter in model.parameters():
        values = parameter.grad.tolist()  # type: ignore[union-attr]  # a backward has set it
        parameter.grad = None
        parameter.grad = torch.tensor(values) / WORLD


def divide_some(model: nn.Module) -> None:
    last = list(model.parameters())[-1]
    assert last.grad is not None
    last.grad /= WORLD


def divide_in_inference_mode(model: nn.Module) -> None:
    """Make gradients that have no version."""
    with torch.inference_mode():
        divide_anew(model)


CHANGES = [divide_in_place, divide_anew, replace_one_by_one, divide_some, divide_in_inference_mode]


@pytest.mark.parametrize("change", CHANGES)
def test_changed_after_the_backward(change: Callable[[nn.Module], None]) -> None:
    """A mean over ranks or micro-batches that a program takes itself is in the norm."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    true = []
    with captured() as (seen, _):
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model).backward()
            change(model)
            true.append(gradient_norm(model))
            optimizer.step()
    assert seen.totals == pytest.approx(true, rel=1e-6)
    assert seen.paths == [["0", "2"]] * 2


def by_norm(model: nn.Module, *, foreach: bool) -> None:
    clip_grad_norm_(model.parameters(), 1e-3, foreach=foreach)


def by_value(model: nn.Module, *, foreach: bool) -> None:
    clip_grad_value_(model.parameters(), 1e-3, foreach=foreach)


def with_a_norm(model: nn.Module, *, foreach: bool) -> None:
    norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None], foreach=foreach)
    clip_grads_with_norm_(model.parameters(), 1e-3, norm, foreach=foreach)


@pytest.mark.parametrize("clip", [by_norm, by_value, with_a_norm])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("changes", [False, True])
def test_clipped(clip: Callable[..., None], foreach: bool, changes: bool) -> None:  # noqa: FBT001  # parameters of the test
    """The norm is that before clipping, also if gradients have changed before that; functions imported before count."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with captured() as (seen, _):
        loss_of(model).backward()
        if changes:
            divide_in_place(model)
        true = gradient_norm(model)
        clip(model, foreach=foreach)
        assert gradient_norm(model) < true / 10
        optimizer.step()
    assert seen.totals == pytest.approx([true], rel=1e-6)


def test_a_norm_alone_is_no_clipping() -> None:
    """`get_total_norm` changes nothing, so a later change of the gradients counts."""
    model = net()
    with captured() as (seen, _):
        loss_of(model).backward()
        get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        divide_in_place(model)
        true = gradient_norm(model)
        torch.optim.SGD(model.parameters(), 0.01).step()
    assert seen.totals == pytest.approx([true], rel=1e-6)


def test_what_is_unchanged_is_read_once() -> None:
    """An optimizer's step computes nothing if the gradients are as the backward left them, or were clipped since."""

    def operations(*, observed: bool, clip: bool) -> int:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.01, foreach=False)
        loss_of(model).backward()
        with captured(gradient_norms=observed) as (seen, _):
            optimizer.zero_grad()
            loss_of(model).backward()
            counted = Operations()
            with counted:
                if clip:
                    clip_grad_norm_(model.parameters(), 1e-3)
                optimizer.step()
        assert [norms is not None for norms in seen.norms] == [observed]
        return counted.seen

    for clip in (False, True):
        assert operations(observed=True, clip=clip) == operations(observed=False, clip=clip)


def test_two_backwards_before_two_optimizers() -> None:
    """Each optimizer's clipping is before its own step."""
    models = [net(), net()]
    optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in models]
    with captured() as (seen, _):
        for model in models:
            loss_of(model).backward()
        clip_grad_norm_(models[0].parameters(), 1e-3)
        divide_in_place(models[1])
        second = gradient_norm(models[1])
        clip_grad_norm_(models[1].parameters(), 1e-3)
        for optimizer in optimizers:
            optimizer.step()
    (norms,) = seen.norms
    assert norms is not None
    assert {info.model for info, _ in norms.modules} == {"Sequential", "Sequential-2"}
    found = math.hypot(*(norm for info, norm in norms.modules if info.model == "Sequential-2"))
    assert found == pytest.approx(second, rel=1e-6)
    assert norms.total > 1


def test_one_model_with_two_optimizers() -> None:
    """A module whose parameters two optimizers share has one norm over both."""
    model = net()
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    optimizers = [torch.optim.SGD(biases, 0.01), torch.optim.Adam(weights, 0.01)]
    with captured() as (seen, _):
        loss_of(model).backward()
        true = [true_norm(p.grad for p in layer.parameters()) for layer in (model[0], model[2])]
        for optimizer in optimizers:
            optimizer.step()
    (norms,) = seen.norms
    assert norms is not None
    assert [info.path for info, _ in norms.modules] == ["0", "2"]
    assert [norm for _, norm in norms.modules] == pytest.approx(true, rel=1e-6)
    assert norms.total == pytest.approx(math.hypot(*true), rel=1e-6)


def test_the_last_step_of_an_optimizer_counts() -> None:
    """A critic that is trained several times in a step counts with the last."""
    generator, critic = net(), nn.Linear(2, 1)
    critics, generators = (torch.optim.SGD(model.parameters(), 0.01) for model in (critic, generator))
    with captured() as (seen, capture):
        capture.step_begins()
        for _ in range(3):
            critics.zero_grad()
            critic(generator(torch.randn(4, 4)).detach()).square().sum().backward()
            true = gradient_norm(critic)
            critics.step()
        loss_of(generator).backward()
        true = math.hypot(true, gradient_norm(generator))
        generators.step()
        capture.step_ends(None)
    assert seen.totals == pytest.approx([true], rel=1e-6)


def test_gradients_without_a_backward() -> None:
    """Gradients that a program sets by itself, as schedules with a split backward do, are known when they are used."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    true = []
    with captured() as (seen, _):
        for _ in range(2):
            found = torch.autograd.grad(loss_of(model), list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), found, strict=True):
                parameter.grad = gradient
            true.append(gradient_norm(model))
            optimizer.step()
    assert seen.totals == pytest.approx(true, rel=1e-6)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_divided_under_a_scaler(fused: bool, clip: bool) -> None:  # noqa: FBT001  # parameters of the test
    """What a program divides before a scaler's step counts without the scale."""
    model, scaled = net(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, fused=fused)
    with captured() as (seen, _):
        scaled.scale(loss_of(model)).backward()
        divide_in_place(model)
        true = gradient_norm(model) / 1024
        if clip:
            scaled.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1e-3)
        scaled.step(optimizer)
        scaled.update()
    assert seen.totals == pytest.approx([true], rel=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_reads_once(fused: bool) -> None:  # noqa: FBT001  # a parameter of the test
    """A scaler's own operations on gradients are no change: nothing is read again for them."""

    def operations(*, observed: bool) -> int:
        model, scaled = net(), torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.SGD(model.parameters(), 0.01, fused=fused)
        with captured(gradient_norms=observed):
            scaled.scale(loss_of(model)).backward()
            counted = Operations()
            with counted:
                scaled.step(optimizer)
        return counted.seen

    assert operations(observed=True) == operations(observed=False)


def test_steps_without_norms_pay_nothing() -> None:
    """On steps whose norms are not taken, an optimizer's gradients are not looked at."""

    class Looked(torch.optim.SGD):
        looked = 0

        @property
        def param_groups(self) -> Any:
            Looked.looked += 1
            return self.groups

        @param_groups.setter
        def param_groups(self, groups: Any) -> None:
            self.groups = groups

    def looks(*, observed: bool) -> list[int]:
        model = net()
        optimizer = Looked(model.parameters(), 0.01, foreach=False)
        counts = []
        with captured(gradient_norms=3 if observed else False):
            for _ in range(3):
                loss_of(model).backward()
                Looked.looked = 0
                optimizer.step()
                counts.append(Looked.looked)
        return counts

    plain, observed = looks(observed=False), looks(observed=True)
    assert observed[0] > plain[0]
    assert observed[1:] == plain[1:]


def test_a_compiled_step_may_clip() -> None:
    """A compiled function that clips its gradients stays one graph, and computes the same."""

    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(2)]

    def step() -> Tensor:
        return clip_grad_norm_(parameters, 1.0)

    def clipped(clip: Callable[[], Tensor]) -> list[Tensor]:
        for place, parameter in enumerate(parameters):
            parameter.grad = torch.full((3,), place + 1.0)
        return [clip(), *(parameter.grad for parameter in parameters if parameter.grad is not None)]

    expected = clipped(step)
    with captured():
        torch._dynamo.reset()
        found = clipped(torch.compile(step, backend="eager", fullgraph=True))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    torch._dynamo.reset()


def test_no_gradient_is_kept() -> None:
    """What was read of a gradient does not keep it."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with captured():
        loss_of(model).backward()
        gone = [weakref.ref(parameter.grad) for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        assert [reference() for reference in gone] == [None] * 4
