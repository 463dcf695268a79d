"""Gradient norms under `GradScaler`: as if the loss had never been scaled."""

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fidelity.norms import true_norm
from support.gradient_norm_training import ROWS, captured, gradient_norm, loss_of, net
from torch import Tensor, nn

SCALE = 1024.0


def scaler(**settings: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=SCALE, **settings)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_norms_are_unscaled(fused: bool, micro_batches: int) -> None:  # noqa: FBT001  # a parameter of the test
    """With optimizers that unscale by themselves and others, and where gradients accumulate."""
    model, scaled = net(), scaler(growth_interval=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, fused=fused)
    true = []
    with captured() as (seen, _):
        for _ in range(3):
            for _ in range(micro_batches):
                scaled.scale(loss_of(model)).backward()
            true.append(gradient_norm(model) / scaled.get_scale())
            scaled.step(optimizer)
            scaled.update()
            optimizer.zero_grad()
    assert scaled.get_scale() == 8 * SCALE
    assert seen.totals == pytest.approx(true, rel=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_is_told(fused: bool) -> None:  # noqa: FBT001  # a parameter of the test
    """A step that is skipped has its infinite norm, and the next one its own."""
    model, scaled = net(), scaler()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, fused=fused)
    true = []
    with captured() as (seen, _):
        for factor in (1.0, math.inf, 1.0):
            scaled.scale(loss_of(model) * factor).backward()
            true.append(gradient_norm(model) / scaled.get_scale())
            scaled.step(optimizer)
            scaled.update()
            optimizer.zero_grad()
    assert scaled.get_scale() == SCALE / 2
    first, overflowing, last = seen.totals
    assert [first, last] == pytest.approx([true[0], true[2]], rel=1e-6)
    assert not math.isfinite(overflowing)


def test_a_list_of_losses() -> None:
    """`scale` takes lists, too."""
    model, scaled = net(), scaler()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with captured() as (seen, _):
        torch.autograd.backward(scaled.scale([loss_of(model), loss_of(model)]))
        true = gradient_norm(model) / SCALE
        scaled.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        scaled.step(optimizer)
        scaled.update()
    assert seen.totals == pytest.approx([true], rel=1e-6)


def test_a_loss_that_is_not_scaled() -> None:
    """After the scaled part of a program its unscaled part is taken as it is."""
    model, other, scaled = net(), net(), scaler()
    optimizers = [torch.optim.SGD(m.parameters(), 0.01) for m in (model, other)]
    with captured() as (seen, _):
        scaled.scale(loss_of(model)).backward()
        true = gradient_norm(model) / SCALE
        scaled.step(optimizers[0])
        model.zero_grad()
        loss_of(other).backward()
        true = math.hypot(true, gradient_norm(other))
        optimizers[1].step()
        scaled.update()
    assert seen.totals == pytest.approx([true], rel=1e-6)


class Pair:
    """Two networks with an optimizer each, and one scaler."""

    def __init__(self) -> None:
        self.models = [net(), net()]
        self.optimizers = [torch.optim.SGD(model.parameters(), 0.0) for model in self.models]
        self.scaler = scaler()
        (self.first, self.second), losses = self.optimizers, [loss_of(model) for model in self.models]
        grads = [torch.autograd.grad(loss, [*m.parameters()]) for loss, m in zip(losses, self.models, strict=True)]
        self.true = [true_norm(grad) for grad in grads]

    def scale(self) -> list[Tensor]:
        self.first.zero_grad()
        self.second.zero_grad()
        return [self.scaler.scale(loss_of(model)) for model in self.models]


def shares(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    return one * 0.5, other * 0.5


def step_between(pair: Pair, one: Tensor, other: Tensor) -> None:
    one.backward()
    pair.scaler.step(pair.first)
    other.backward()
    pair.scaler.step(pair.second)


def step_after(pair: Pair, one: Tensor, other: Tensor) -> None:
    one.backward()
    other.backward()
    pair.scaler.step(pair.first)
    pair.scaler.step(pair.second)


def clip(pair: Pair, index: int) -> None:
    pair.scaler.unscale_(pair.optimizers[index])
    nn.utils.clip_grad_norm_(pair.models[index].parameters(), 1e9)  # multiplied in place, by one


def clip_and_step_between(pair: Pair, one: Tensor, other: Tensor) -> None:
    one.backward()
    clip(pair, 0)
    pair.scaler.step(pair.first)
    other.backward()
    clip(pair, 1)
    pair.scaler.step(pair.second)


def clip_between(pair: Pair, one: Tensor, other: Tensor) -> None:
    one.backward()
    clip(pair, 0)
    other.backward()
    clip(pair, 1)
    pair.scaler.step(pair.first)
    pair.scaler.step(pair.second)


def update_between(pair: Pair, one: Tensor, other: Tensor) -> None:
    one.backward()
    pair.scaler.step(pair.first)
    pair.scaler.update()
    again = pair.scaler.scale(loss_of(pair.models[1]))  # which a scale that has changed since would not let through
    (again * (other / again).detach()).backward()
    pair.scaler.step(pair.second)


@pytest.mark.parametrize("order", [step_between, step_after, clip_and_step_between, clip_between, update_between])
@pytest.mark.parametrize("share", [False, True])
def test_two_optimizers(order: Callable[[Pair, Tensor, Tensor], None], share: bool) -> None:  # noqa: FBT001  # a parameter
    """In whatever order one scaler serves both, the last backward leaves both networks' own norms."""
    pair = Pair()
    with captured() as (seen, _):
        for _ in range(3):
            one, other = pair.scale()
            order(pair, *(shares(one, other) if share else (one, other)))
            pair.scaler.update()
    true = [norm * (0.5 if share else 1) for norm in pair.true]
    norms = [[norm for _, norm in step.modules] for step in seen.norms if step is not None]
    assert len(norms) == 3
    for found in norms:
        assert math.hypot(*found[:2]) == pytest.approx(true[0], rel=1e-5)
        assert math.hypot(*found[2:]) == pytest.approx(true[1], rel=1e-5)


@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_gan_with_one_scaler(set_to_none: bool) -> None:  # noqa: FBT001  # a parameter of the test
    """Each network counts with what its optimizer got, without what the second backward adds to the critic."""
    generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)
    critics, generators = (torch.optim.SGD(model.parameters(), 0.0) for model in (critic, generator))
    scaled = scaler()
    with captured() as (seen, _):
        for _ in range(2):
            scaled.scale(critic(generator(ROWS).detach()).square().sum()).backward()
            true = gradient_norm(critic)
            scaled.step(critics)
            critics.zero_grad(set_to_none=set_to_none)
            generators.zero_grad(set_to_none=set_to_none)
            scaled.scale(critic(generator(ROWS)).sum()).backward()
            true = math.hypot(true, gradient_norm(generator)) / SCALE
            scaled.step(generators)
            scaled.update()
            critics.zero_grad()
    assert seen.totals == pytest.approx([true] * 2, rel=1e-5)


def test_a_loop_without_update() -> None:
    """Where the user divides, a backward without a scale is still taken as it is."""
    model, other, scaled = net(), net(), scaler()
    optimizers = [torch.optim.SGD(m.parameters(), 0.0) for m in (model, other)]
    with captured() as (seen, _):
        for _ in range(2):
            scaled.scale(loss_of(model)).backward()
            true = gradient_norm(model) / SCALE
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= SCALE
            optimizers[0].step()
            optimizers[0].zero_grad()
        loss_of(other).backward()
        optimizers[1].step()
    assert seen.totals == pytest.approx([true, true, gradient_norm(other)], rel=1e-5)


def test_a_scaler_that_is_off() -> None:
    """`enabled=False` scales nothing."""
    model, scaled = net(), scaler(enabled=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with captured() as (seen, _):
        scaled.scale(loss_of(model)).backward()
        true = gradient_norm(model)
        scaled.step(optimizer)
    assert seen.totals == pytest.approx([true], rel=1e-6)


def test_a_scale_on_another_device() -> None:
    """Where the scale would have to be waited for, there are no norms."""
    model = net()
    with captured() as (seen, _):
        scaled = scaler()
        scaled._device = "cuda"  # the gradients are on the CPU, as with offloading
        scaled.scale(loss_of(model)).backward()
        torch.optim.SGD(model.parameters(), 0.01).step()
    assert seen.norms == [None]


def test_a_watched_tensor() -> None:
    """The gradient of a watched tensor is unscaled as well."""
    scaled = scaler()
    with captured() as (seen, capture):
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        y = x + 2
        capture.watches.watch(y, "y")
        scaled.scale((y**2).mean()).backward()
        capture.uninstall()
        capture.end()
    (gradient,) = seen.steps[0].tensor_gradients
    assert gradient.norm == pytest.approx(5)


def test_a_watched_tensor_after_another_step() -> None:
    """Also where the scaler has stepped for another network since the loss was scaled."""
    pair = Pair()
    with captured() as (seen, capture):
        one, other = pair.scale()
        y = other * 1
        capture.watches.watch(y, "loss")
        one.backward()
        pair.scaler.step(pair.first)
        torch.autograd.backward(y, torch.tensor(SCALE))  # as much as one of the loss that is not scaled
        capture.uninstall()
        capture.end()
    (gradient,) = [found for step in seen.steps for found in step.tensor_gradients]
    assert gradient.norm == pytest.approx(1)


def test_the_scaler_is_not_kept() -> None:
    """A scaler that is no longer used goes."""
    model = net()
    with captured():
        scaled = scaler()
        scaled.scale(loss_of(model)).backward()
        gone = weakref.ref(scaled)
        del scaled
        assert gone() is None


def test_the_sharded_scaler_is_seen() -> None:
    """FSDP's scaler has a `scale` of its own."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler  # noqa: PLC0415  # imports a lot

    before = vars(ShardedGradScaler)["scale"]
    with captured():
        assert vars(ShardedGradScaler)["scale"] is not before
    assert vars(ShardedGradScaler)["scale"] is before


def test_compiled_code_may_scale() -> None:
    """A compiled function that scales its loss breaks no more often than without."""
    import torch._dynamo.testing as dynamo  # noqa: PLC0415  # 1.4 s

    def breaks() -> int:
        torch._dynamo.reset()
        counter = dynamo.CompileCounter()
        scaled = scaler()

        @torch.compile(backend=counter)
        def step(x: Tensor) -> Tensor:
            return scaled.scale((x * 2).sum()) + 1

        assert step(torch.ones(3)).item() == 6 * SCALE + 1
        return counter.frame_count

    plain = breaks()
    with captured():
        assert breaks() == plain
