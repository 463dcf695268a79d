"""Loops of every kind: closures, several optimizers, averaged copies, pruning, what is saved and loaded in mid-run."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from fidelity.forward_subjects import model_of
from fidelity.layer_subjects import subject
from fidelity.subjects import Loop, Subject, loss_of

Stepped = Iterator[tuple[Any, Tensor]]


def subjects() -> Iterator[Subject]:
    """Yield all of them."""
    kinds = {"loops": LOOPS, "loops that change the model": CHANGING, "loops that save": SAVING}
    for kind, loops in kinds.items():
        for name, loop in loops.items():
            yield subject(kind, name, partial(model_of, _forward), loop=loop, norms=False)


def _forward(m: Any, x: Tensor) -> Any:
    return m.b(m.norm(m.a(x)))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)


def _backward(model: nn.Module, x: Tensor) -> tuple[Any, Tensor]:
    output = model(x)
    loss = loss_of(output)
    loss.backward()
    return output, loss


def _step(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> Stepped:
    optimizer.zero_grad()
    yield _backward(model, x)
    optimizer.step()


# ---- what calls what


def _closures(model: nn.Module, x: Tensor) -> Stepped:
    optimizer = torch.optim.LBFGS(model.parameters(), 1e-2, max_iter=3, line_search_fn="strong_wolfe")
    seen: list[tuple[Any, Tensor]] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        seen.append(_backward(model, x))
        return seen[-1][1]

    for _ in range(2):
        optimizer.step(closure)
        yield seen[-1]


def _several(m: Any, x: Tensor) -> Stepped:
    optimizers = [_sgd(part) for part in (m.a, m.b)]
    for _ in range(2):
        for optimizer in optimizers:
            yield from _step(m, x, optimizer)


def _accumulated(model: nn.Module, x: Tensor) -> Stepped:
    optimizer = _sgd(model)
    for _ in range(2):
        for part in x, x * 2:
            yield _backward(model, part)
        optimizer.step()
        optimizer.zero_grad()


def _in_backward(model: nn.Module, x: Tensor) -> Stepped:
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], 1e-3)

        def step(_: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        yield _backward(model, x)


def _loaded(model: nn.Module, x: Tensor) -> Stepped:
    optimizer = _sgd(model)
    loader = DataLoader(
        TensorDataset(x.repeat(2, 1)), batch_size=3, shuffle=True, num_workers=1, persistent_workers=True
    )
    for _ in range(2):
        for (batch,) in loader:
            yield from _step(model, batch, optimizer)


LOOPS: dict[str, Loop] = {
    "closures": _closures,
    "several optimizers": _several,
    "accumulation": _accumulated,
    "optimizers in the backward": _in_backward,
    "workers that stay": _loaded,
}


# ---- what happens to a model between two steps


def _between(do: Callable[[Any, Tensor], object], model: nn.Module, x: Tensor) -> Stepped:
    optimizer = _sgd(model)
    yield from _step(model, x, optimizer)
    do(model, x)
    yield from _step(model, x, optimizer)


def _pruned(m: Any, x: Tensor) -> None:
    prune.l1_unstructured(m.a, "weight", 0.3)
    prune.random_structured(m.b[0], "weight", amount=2, dim=0)


def _pruned_for_good(m: Any, x: Tensor) -> None:
    _pruned(m, x)
    with torch.no_grad():
        m(x)
    prune.remove(m.a, "weight")


def _frozen(m: Any, x: Tensor) -> None:
    m.a.requires_grad_(requires_grad=False)
    m.b.eval()


def _cast(m: Any, x: Tensor) -> None:
    m.double()
    m.float()


def _inferred(m: Any, x: Tensor) -> None:
    m.eval()
    with torch.inference_mode():
        m(x)
    m.train()


def _averaged(model: nn.Module, x: Tensor) -> Stepped:
    optimizer = _sgd(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(2):
        yield from _step(model, x, optimizer)
        average.update_parameters(model)
        with torch.no_grad():
            average.module(x)


def _averaged_by_hand(model: nn.Module, x: Tensor) -> Stepped:
    optimizer, average = _sgd(model), copy.deepcopy(model).requires_grad_(requires_grad=False)
    for _ in range(2):
        yield from _step(model, x, optimizer)
        torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.1)
        with torch.no_grad():
            average(x)


CHANGING: dict[str, Loop] = {
    "pruned": partial(_between, _pruned),
    "pruned for good": partial(_between, _pruned_for_good),
    "partly frozen": partial(_between, _frozen),
    "cast and cast back": partial(_between, _cast),
    "inference in between": partial(_between, _inferred),
    "averaged": _averaged,
    "averaged by hand": _averaged_by_hand,
}


# ---- what goes through a file


def _through(copied: Callable[[Any], Any], model: Any, x: Tensor) -> Stepped:
    """Go on with copies of model and optimizer."""
    optimizer = _sgd(model)
    yield from _step(model, x, optimizer)
    other, state = copied((model, optimizer.state_dict()))
    optimizer = _sgd(other)
    optimizer.load_state_dict(state)
    yield from _step(other, x, optimizer)
    model.load_state_dict(other.state_dict())


def _pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))  # noqa: S301  # our own bytes


def _stored(value: Any, *, weights_only: bool = False) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def _states(m: Any, x: Tensor) -> None:
    other = copy.deepcopy(m)
    other.load_state_dict(_stored(m.state_dict(), weights_only=True), assign=True)
    m.load_state_dict(other.state_dict())


SAVING: dict[str, Loop] = {
    "copies": partial(_through, copy.deepcopy),
    "pickles": partial(_through, _pickled),
    "files": partial(_through, _stored),
    "states": partial(_between, _states),
}
