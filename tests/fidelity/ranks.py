"""Trainings on several ranks: their numbers without torchotel and with it, and their traces."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from support.ranks import call_on_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fidelity.counted import Counted, counting
from fidelity.forward_subjects import block, linear
from fidelity.traces import faults
from torchotel import _semconv as names
from torchotel.testing import Captured, capture

Built = Callable[[nn.Module], object]
"""Called with the model before any wrapper, when the building of modules has ended."""
RankTraining = Callable[[int, Built], tuple[list[Tensor], list[Tensor]]]
"""Trains on a rank; returns the loss of each step, and all other numbers of this rank at the end."""


Trainings = Callable[[], Iterable[RankTraining]]


def check_on_ranks(trainings: Trainings, folder: Path, *, ranks: int = 2, compiled: bool = False) -> None:
    """Check trainings on that many processes; a fault on any rank raises.

    Args:
        trainings: Yields the trainings, on each rank.
        folder: Where the ranks meet.
        ranks: How many processes train.
        compiled: Whether regions are compiled, so that module calls can't be counted.
    """
    call_on_ranks(partial(_check_on_rank, compiled=compiled), ranks, folder, trainings)


def plain_model() -> nn.Module:
    """Make a model with random numbers, an operation in place, and modules in modules."""
    return nn.Sequential(linear(), block(), linear())


def numbers_of(model: nn.Module) -> list[Tensor]:
    """Return the gradients and the parameters that this rank has."""
    parameters = [*model.parameters()]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [_here(tensor) for tensor in (*gradients, *parameters)]


def _here(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _check_on_rank(rank: int, trainings: Trainings, *, compiled: bool) -> None:
    for training in trainings():
        found = _faults_of(training, rank, compiled=compiled)
        assert not found, (getattr(training, "__name__", training), found)


def _faults_of(training: RankTraining, rank: int, *, compiled: bool) -> list[str]:
    losses, expected = training(rank, lambda _: None)
    known: set[str] = set()
    counting_calls = nullcontext(Counted()) if compiled else counting()
    with capture(max_spans=None, gradient_norms=True) as captured, counting_calls as counted:

        def built(model: nn.Module) -> None:
            counted.built()
            known.update(_names_of(model))

        numbers = training(rank, built)
    with capture(detail=2 + rank):  # with the hooks in and out; a collective of torchotel's would meet no other rank's
        in_turns = training(rank, lambda _: None)
    found = [*([] if compiled else faults(counted, captured)), *_foreign_names(captured, known)]
    found += [] if len(captured.steps) == len(losses) else [f"{len(captured.steps)} steps of {len(losses)}"]
    for how, (own_losses, others) in {"all the time": numbers, "in turns": in_turns}.items():
        same = _same([*own_losses, *others], [*losses, *expected])
        found += [] if same else [f"other numbers with the hooks in {how}"]
    return found


def _foreign_names(captured: Captured, known: set[str]) -> list[str]:
    """Name the modules that the model without wrappers does not have."""
    spans = [span.attributes for root in captured.roots for span in root.walk()]
    seen = {str(span[names.MODULE_PATH]) for span in spans if names.MODULE_PATH in span}
    return [f"a module is named {name}" for name in seen - known]


def _names_of(model: nn.Module) -> set[str]:
    return {path or type(model).__name__ for path, _ in model.named_modules()}


def _same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))
