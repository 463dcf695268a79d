"""Mixed precision: autocast in all its nestings, and losses that are scaled, steps that are skipped among them."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler, autocast, custom_bwd, custom_fwd

from fidelity.forward_subjects import Forward, model_of
from fidelity.layer_subjects import subject
from fidelity.subjects import Subject, loss_of

Optimize = Callable[..., torch.optim.Optimizer]

half = partial(autocast, "cpu", torch.bfloat16)


class Squared(torch.autograd.Function):
    """Computes in float32 wherever it stands."""

    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)  # type: ignore[untyped-decorator]  # torch's
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.square(x)

    @staticmethod
    @custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]  # torch's
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.mul(2 * x, gradients[0])


def subjects() -> Iterator[Subject]:
    """Yield all of them."""
    for name, run in _casts().items():
        yield subject("mixed precision, autocast", name, partial(model_of, run))
    plain = partial(model_of, lambda m, x: m.b(m.norm(m.a(x))))
    for name, loop in _scaled().items():
        yield subject("mixed precision, scaled", name, plain, loop=loop, steps=3)


def _casts() -> dict[str, Forward]:
    def inside(*settings: dict[str, Any]) -> Forward:
        def run(m: Any, x: Tensor) -> Any:
            with half():
                y = m.a(x)
                for setting in settings:
                    with autocast("cpu", **setting):
                        y = m.b(y.float())
                return m.norm(m.a(y))

        return run

    def only_a_part(m: Any, x: Tensor) -> Any:
        with half():
            y = m.a(x)
        return m.b(y.float())

    return {
        "all": inside(),
        "nested": inside({"dtype": torch.float16, "cache_enabled": False}, {"dtype": torch.bfloat16}),
        "disabled within": inside({"enabled": False}),
        "without its cache": inside({"dtype": torch.bfloat16, "cache_enabled": False}),
        "a part": only_a_part,
        "as a decorator": half()(lambda m, x: m.b(m.a(x))),
        "function that casts": half()(lambda m, x: m.b(Squared.apply(m.a(x)))),
    }


def _scaled() -> dict[str, Callable[..., Any]]:
    sgd = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
    adam = partial(torch.optim.Adam, lr=1e-3)
    return {
        "SGD": partial(_train, sgd),
        "SGD, fused": partial(_train, partial(sgd, fused=True)),
        "Adam, fused": partial(_train, partial(adam, fused=True)),
        "a step skipped": partial(_train, sgd, overflows=True),
        "a step skipped, fused": partial(_train, partial(adam, fused=True), overflows=True),
        "clipped": partial(_train, sgd, clips=True),
        "restored": partial(_train, sgd, restores=True),
        "disabled": partial(_train, sgd, scale=None),
    }


def _train(
    optimize: Optimize,
    model: nn.Module,
    x: Tensor,
    *,
    overflows: bool = False,
    clips: bool = False,
    restores: bool = False,
    scale: float | None = 2.0**12,
) -> Iterator[tuple[Any, Tensor]]:
    """Train three steps; of the second the loss may overflow, and before the third the scale may come from a file."""
    device = x.device.type
    optimizer, scaler = optimize(model.parameters()), GradScaler(device, scale or 1.0, enabled=scale is not None)
    for step in range(3):
        optimizer.zero_grad()
        with autocast(device, torch.bfloat16):
            output = model(x)
        loss = loss_of(output) * (float("inf") if overflows and step == 1 else 1)
        scaler.scale(loss).backward()
        yield output, loss
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        if restores and step == 1:
            state, scaler = scaler.state_dict(), GradScaler(device)
            scaler.load_state_dict(state)
