"""How true gradient norms are: those of modules and of the whole, against `torch.linalg` in double precision."""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fidelity.training import Outcome
from torchotel import _semconv as names
from torchotel._records import GradientNorms, StepRecord
from torchotel.testing import Captured

MOST_OF_MODULE = 1e-3
MOST_OF_TOTAL = 1e-4


class NormErrors(NamedTuple):
    """How far the worst is off, relatively."""

    module: float
    total: float

    @property
    def faults(self) -> list[str]:
        """Name what is further off than it may be."""
        found = [f"the norm of a module is off by {self.module:.1e}"] if self.module > MOST_OF_MODULE else []
        return found + ([f"the norm of all is off by {self.total:.1e}"] if self.total > MOST_OF_TOTAL else [])


def true_norm(tensors: Iterable[Tensor | None]) -> float:
    """Give the L2 norm over all tensors in double precision."""
    return math.hypot(*(torch.linalg.vector_norm(_exact(tensor)).item() for tensor in tensors if tensor is not None))


def _exact(tensor: Tensor) -> Tensor:
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    return dense.to(torch.complex128 if dense.is_complex() else torch.float64)


def norm_errors(outcome: Outcome, captured: Captured) -> NormErrors:
    """Compare the norms that steps say with those of the very gradients; what is missing is infinitely off."""
    units = [record for record in captured.records if isinstance(record, StepRecord) and record.kind == "step"]
    of_modules, of_totals = [0.0], [0.0]
    for gradients, unit, span in zip(outcome.gradients, units, captured.steps, strict=True):
        seen = _of_modules(unit.gradients)
        true = {path: true_norm(own) for path, own in _by_module(gradients).items()}
        of_modules += [_error(seen.get(path), true.get(path)) for path in seen.keys() | true.keys()]
        of_totals.append(_error(span.attributes.get(names.GRADIENT_NORM), math.hypot(*true.values())))
    return NormErrors(max(of_modules), max(of_totals))


def _by_module(gradients: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = {}
    for name, gradient in gradients.items():
        found.setdefault(name.rpartition(".")[0], []).append(gradient)
    return found


def _of_modules(norms: GradientNorms | None) -> dict[str, float]:
    return {info.path if info.depth else "": norm for info, norm in norms.modules} if norms is not None else {}


def _error(seen: object, true: float | None) -> float:
    if not isinstance(seen, float) or true is None:
        return math.inf
    return 0.0 if seen == true else abs(seen - true) / true if true else math.inf
