"""Trainings whose gradient norms are hard to tell: clipped, summed over batches, scaled, of large or many numbers."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fidelity.layer_subjects import SIDE, applied, chain, subject
from fidelity.subjects import Loop, Subject, loss_of

STEPS = 2
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WIDTH = 4096
"""A square of it is 16 million."""


def subjects() -> Iterator[Subject]:
    """Yield those of small models."""
    of = partial(subject, "gradient norms")
    linear = partial(nn.Linear, SIDE, SIDE)
    layers = chain(linear, nn.Tanh, linear)
    for name, loop in _loops().items():
        yield of(name, layers, loop=loop, norms=True)
    for name, dtype in DTYPES.items():
        narrow = chain(partial(linear, dtype=dtype), nn.Tanh, partial(linear, dtype=dtype))
        steep = applied(lambda m, x: m.layers(x) * 2.0**14, layers=narrow)
        yield of(f"thousands of {name}, whose squares overflow in half", steep, inputs=_drawn(dtype, SIDE))


def large() -> Iterator[Subject]:
    """Yield those of many numbers."""
    for name, dtype in DTYPES.items():
        layer = partial(nn.Linear, WIDTH, WIDTH, dtype=dtype)
        yield subject("gradient norms", f"16 million of {name}", layer, inputs=_drawn(dtype, WIDTH))


def _drawn(dtype: torch.dtype, width: int) -> Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]:
    return lambda: ((torch.randn(3, width, dtype=dtype),), {})


def _loops() -> dict[str, Loop]:
    scaled = {
        f"scaled, {fused} {cast}".strip(): partial(_scaled, fused=fused == "fused", cast=bool(cast))
        for fused in ("fused", "not fused")
        for cast in ("", "under autocast")
    }
    return {"clipped": _clipped, "summed over three batches": _summed, **scaled}


def _clipped(model: nn.Module, x: Tensor) -> Iterator[tuple[Any, Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        output = model(x)
        loss = loss_of(output)
        loss.backward()
        yield output, loss
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()


def _summed(model: nn.Module, x: Tensor) -> Iterator[tuple[Any, Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for part in x:
            output = model(part)
            loss = loss_of(output)
            loss.backward()
        yield output, loss
        optimizer.step()


def _scaled(model: nn.Module, x: Tensor, *, fused: bool, cast: bool) -> Iterator[tuple[Any, Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=fused)
    scaler = torch.amp.GradScaler(x.device.type, init_scale=1024.0, growth_interval=1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast(x.device.type, torch.bfloat16) if cast else nullcontext():
            output = model(x)
        loss = loss_of(output)
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # which brings the gradients back
        scaler.update()
        yield output, loss
