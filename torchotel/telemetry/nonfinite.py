"""What of a step went NaN or infinite: the loss, and the layers whose gradients did."""

from __future__ import annotations

from math import isfinite

from torchotel._records import ModuleInfo, Unit
from torchotel.telemetry.timing import Timed

MOST_NAMES = 16


def find_nonfinite(unit: Unit, timed: Timed) -> tuple[str, ...]:
    """Name the first that went NaN or infinite: the loss, then layers in the order that their backwards ran.

    Where the order is not known, since the step has no detail, the last layer of the model comes first.
    """
    loss = unit.values.get("loss")
    found = ["loss"] if isinstance(loss, float) and not isfinite(loss) else []
    if unit.gradients is not None and not isfinite(unit.gradients.total):
        bad = [module for module, norm in reversed(unit.gradients.modules) if not isfinite(norm)]
        ends = _ends(timed) if bad else {}
        bad.sort(key=lambda module: ends.get(module, unit.end_ns))
        found += [f"gradient {module.path}" for module in bad]
    return tuple(found[:MOST_NAMES])


def _ends(timed: Timed) -> dict[ModuleInfo, int]:
    """When each module's first backward ended: a container's begins before those of the layers that it ends after."""
    ends: dict[ModuleInfo, int] = {}
    for run in timed.runs:
        module = timed.calls[run.call].site.module
        ends[module] = min(run.end_ns, ends.get(module, run.end_ns))
    return ends
