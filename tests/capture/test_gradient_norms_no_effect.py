"""Gradient norms leave alone what they look at: training, its modes and its memory are as without them."""

import weakref

import torch
from support.gradient_norm_training import Operations, captured, loss_of, net, trained
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode


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
