"""Gradient norms under `GradScaler`: as if the loss had never been scaled."""

import math
import weakref
from typing import Any

import pytest
import torch
from gradient_norms import captured, gradient_norm, net
from torch import Tensor, nn

ROWS = torch.linspace(-1, 1, 20).reshape(5, 4)
SCALE = 1024.0


def loss_of(model: nn.Module) -> Tensor:
    return model(ROWS).square().sum()  # type: ignore[no-any-return]  # a module call is Any


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
        scaled.step(optimizers[0])
        model.zero_grad()
        loss_of(other).backward()
        true = gradient_norm(other)
        optimizers[1].step()
        scaled.update()
    assert seen.totals[-1] == pytest.approx(true, rel=1e-6)


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
