"""Find calls that were not recorded, and steps with values that are not finite."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

from torchotel._limits import MAX_NONFINITE_NAMES
from torchotel._records import ModuleInfo, StepRecord
from torchotel._utils.faults import Warn
from torchotel.tracing.call_tree import CallTree

SURE = 3
"""Steps of a thread after which it is told; the first may have begun before `instrument()`."""

NO_FORWARD = (
    "steps run a backward, and before it no module with parameters on their thread: their forward is a function, "
    "perhaps a compiled one, is a `forward` that is called by its name, or ran on another thread, which makes a step "
    "of each backward there, or in an autograd.Function (as of odeint_adjoint), where each call is an evaluation. Call "
    "the model itself, or what calls it from a module's forward, on the backward's thread, and compile it rather than "
    "the function, to see its spans"
)
TRANSFORMED = (
    "%s runs inside a transform of torch.func, and a backward outside of the transform: there it can't be seen, so it "
    "has no backward span, and its time is that of the module around. A backward that torch.func.grad runs is seen"
)

NOT_INCLUDED = (
    "`include` matches none of the modules that were called until now, %s among them: none has spans. A pattern stands "
    "for whole paths, and `*` in it for anything, dots too: `*.attention`, `layers.0.*`"
)
ENOUGH = 3
"""Steps in detail after which that is told."""


class BlindSpotDiagnostics:
    """Look what steps lack.

    Args:
        warn: Called with what the user is to know.
        includes: Tells whether a module is one that spans were asked for.
    """

    def __init__(self, warn: Warn, includes: Callable[[ModuleInfo], bool]) -> None:
        self._warn, self._includes = warn, includes
        self._included = False
        """A module that was called is included, or may be where that can't be told."""
        self._others = 0
        """Steps until then."""
        self._forward_seen: set[int] = set()
        """Threads that have called a module with parameters in a step."""
        self._without: dict[int, int] = {}
        """Steps of each other thread."""

    def look(self, unit: StepRecord, tree: CallTree) -> None:
        """Take in a step or an evaluation, and its calls."""
        if unit.hooks_were_out:
            return
        if unit.kind == "step" and unit.calls and not self._included:
            self._look_for_included(unit)
        kinds = {phase.kind for phase in unit.phases}
        if "backward" not in kinds:
            return
        if unit.thread not in self._forward_seen and (unit.detailed or "forward" not in kinds):
            self._look_for_forward(unit)
        if any(call.site.transformed for call in unit.calls):
            self._look_for_backwards(tree)

    def _look_for_included(self, step: StepRecord) -> None:
        # What is inside of a compiled one is no call.
        self._included = any(call.site.compiled or self._includes(call.site.module) for call in step.calls)
        self._others += not self._included
        if self._others == ENOUGH:
            self._warn(NOT_INCLUDED, step.calls[0].site.module)

    def _look_for_forward(self, step: StepRecord) -> None:
        if any(call.site.module.holds_parameters for call in step.calls):
            self._forward_seen.add(step.thread)
            return
        number = self._without[step.thread] = self._without.get(step.thread, 0) + 1
        if number == SURE:
            self._warn(NO_FORWARD)

    def _look_for_backwards(self, tree: CallTree) -> None:
        """Look for calls inside a transform that a backward went around, not through."""
        went_through = {run.call for run in tree.backwards}
        for index in range(tree.first_own, len(tree.calls)):
            site, outer = tree.calls[index].site, tree.parents[index]
            if site.transformed and index not in went_through and (outer < 0 or outer in went_through):
                self._warn(TRANSFORMED, site.module)


def find_nonfinite(unit: StepRecord, tree: CallTree) -> tuple[str, ...]:
    """Name the first that went NaN or infinite: the loss, then layers in the order that their backwards ran.

    Where the order is not known, since the step has no detail, the last layer of the model comes first.
    """
    loss = unit.values.get("loss")
    found = ["loss"] if isinstance(loss, float) and not isfinite(loss) else []
    if unit.gradients is not None and not isfinite(unit.gradients.total):
        bad = [module for module, norm in reversed(unit.gradients.modules) if not isfinite(norm)]
        ends = _ends(tree) if bad else {}
        bad.sort(key=lambda module: ends.get(module, unit.end_ns))
        found += [f"gradient {module.path}" for module in bad]
    return tuple(found[:MAX_NONFINITE_NAMES])


def _ends(tree: CallTree) -> dict[ModuleInfo, int]:
    """When each module's first backward ended: a container's begins before those of the layers that it ends after."""
    ends: dict[ModuleInfo, int] = {}
    for run in tree.backwards:
        module = tree.calls[run.call].site.module
        ends[module] = min(run.end_ns, ends.get(module, run.end_ns))
    return ends
