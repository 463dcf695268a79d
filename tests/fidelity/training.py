"""A short training, and everything that it left behind, compared bit for bit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fidelity.subjects import Subject, loss_of


@dataclass(kw_only=True)
class Outcome:
    """What a training computed."""

    numbers: dict[str, Tensor] = field(default_factory=dict)
    """Losses of every step, parameters and buffers at the end, the state of the random numbers."""
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """Of every step, by the names of their parameters."""
    strides: list[dict[str, tuple[int, ...]]] = field(default_factory=list)
    """Of these; copies may have others."""
    types: list[str] = field(default_factory=list)
    """Of what the model gave out: a hook that hands its outputs on must not wrap them."""

    @property
    def all_numbers(self) -> dict[str, Tensor]:
        """Give the gradients among the others."""
        steps = enumerate(self.gradients)
        return self.numbers | {f"gradient {name} of step {n}": one for n, own in steps for name, one in own.items()}


def train(subject: Subject, built: Callable[[], object] = lambda: None) -> Outcome:
    """Train a subject for its few steps; `built` is called when the model stands."""
    model, args, kwargs = subject.make()
    built()
    torch.manual_seed(1)
    outcome = Outcome()
    loop = subject.loop or partial(_plain, subject)
    for step, (output, loss) in enumerate(loop(model, *args, **kwargs)):
        _note(outcome, model, step, output, loss)
    outcome.numbers |= {f"parameter {name}": value.detach().clone() for name, value in model.named_parameters()}
    outcome.numbers |= {f"buffer {name}": value.clone() for name, value in model.named_buffers()}
    outcome.numbers["random state"] = torch.get_rng_state()
    if subject.device == "cuda":
        outcome.numbers["random state of the device"] = torch.cuda.get_rng_state()
    return outcome


def _plain(subject: Subject, model: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[Any, Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=subject.momentum)
    for _ in range(subject.steps):
        optimizer.zero_grad()
        output = model(*args, **kwargs)
        loss = loss_of(output)
        loss.backward()
        yield output, loss
        optimizer.step()


def _note(outcome: Outcome, model: nn.Module, step: int, output: Any, loss: Tensor) -> None:
    outcome.types.append(type(output).__qualname__)
    outcome.numbers[f"loss of step {step}"] = loss.detach().clone()
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    outcome.gradients.append({name: gradient.detach().clone() for name, gradient in found.items()})
    outcome.strides.append({name: _strides(gradient) for name, gradient in found.items()})


def _strides(gradient: Tensor) -> tuple[int, ...]:
    return () if gradient.layout != torch.strided else gradient.stride()


def differences(one: Outcome, other: Outcome) -> list[str]:
    """Name what is not the same in both, bit for bit; NaN is NaN's equal."""
    numbers, others = one.all_numbers, other.all_numbers
    if numbers.keys() != others.keys():
        return sorted(numbers.keys() ^ others.keys())
    found = [name for name, value in numbers.items() if not _same(value, others[name])]
    found += [] if one.strides == other.strides else ["strides of gradients"]
    return found + ([] if one.types == other.types else ["types of outputs"])


def _same(one: Tensor, other: Tensor) -> bool:
    if one.layout != other.layout or one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.device.type == "meta":
        return True
    if one.layout != torch.strided:
        one, other = one.coalesce(), other.coalesce()
        return torch.equal(one.indices(), other.indices()) and _same(one.values(), other.values())
    if torch.equal(_bytes(one), _bytes(other)):
        return True
    known = ~one.isnan()
    return torch.equal(known, ~other.isnan()) and torch.equal(_bytes(one[known]), _bytes(other[known]))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)
