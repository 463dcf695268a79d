"""Find calls that were not recorded, and values that are not finite."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

from torchotel._limits import MAX_NONFINITE_NAMES
from torchotel._records import ModuleInfo, StepRecord
from torchotel._utils.faults import Warn
from torchotel.tracing.call_tree import CallTree

MIN_STEPS_WITHOUT_FORWARD = 3
"""Steps of a thread before the warning; the first may have begun before `instrument()`."""

NO_FORWARD = (
    "steps run a backward, and before it no module with parameters on their thread, so forward spans are missing. The "
    "forward may be a function, a compiled function or a method called by its name; it may run on another thread, or "
    "in an autograd.Function such as that of odeint_adjoint. Call and compile the model itself, on the thread of the "
    "backward"
)
TRANSFORMED = (
    "%s runs inside a transform of torch.func, and the backward outside: it has no backward span, and its time counts "
    "in the enclosing module. To record its backward, run it by torch.func.grad"
)

NOT_INCLUDED = (
    "`include` matches none of the modules called so far, %s among them, so no module has spans. Use patterns that "
    "match whole paths, in which `*` also matches dots: `*.attention`, `layers.0.*`"
)
MIN_STEPS_NOT_INCLUDED = 3
"""Detailed steps before the warning."""


class BlindSpotDiagnostics:
    """Warn of modules whose calls or backwards are not recorded.

    Args:
        warn: Logs warnings to the user.
        includes: Returns whether `include` matches a module.
    """

    def __init__(self, warn: Warn, includes: Callable[[ModuleInfo], bool]) -> None:
        self._warn, self._includes = warn, includes
        self._included = False
        """Whether an included module was called; a call of a compiled region counts, as its modules are unknown."""
        self._steps_not_included = 0
        self._forward_seen: set[int] = set()
        """Threads that have called a module with parameters in a step."""
        self._steps_without_forward: dict[int, int] = {}
        """By thread."""

    def check(self, record: StepRecord, tree: CallTree) -> None:
        """Check a record and its calls."""
        if record.hooks_were_out:
            return
        if record.kind == "step" and record.calls and not self._included:
            self._check_included(record)
        kinds = {phase.kind for phase in record.phases}
        if "backward" not in kinds:
            return
        if record.thread not in self._forward_seen and (record.detailed or "forward" not in kinds):
            self._check_forward(record)
        if any(call.signature.transformed for call in record.calls):
            self._check_backwards(tree)

    def _check_included(self, step: StepRecord) -> None:
        # The modules of a compiled region have no calls.
        self._included = any(call.signature.compiled or self._includes(call.signature.module) for call in step.calls)
        self._steps_not_included += not self._included
        if self._steps_not_included == MIN_STEPS_NOT_INCLUDED:
            self._warn(NOT_INCLUDED, step.calls[0].signature.module)

    def _check_forward(self, step: StepRecord) -> None:
        if any(call.signature.module.holds_parameters for call in step.calls):
            self._forward_seen.add(step.thread)
            return
        number = self._steps_without_forward[step.thread] = self._steps_without_forward.get(step.thread, 0) + 1
        if number == MIN_STEPS_WITHOUT_FORWARD:
            self._warn(NO_FORWARD)

    def _check_backwards(self, tree: CallTree) -> None:
        """Find calls inside a transform whose enclosing call has a backward while they have none."""
        with_backward = {backward.call for backward in tree.backwards}
        for index in range(tree.first_own, len(tree.calls)):
            signature, outer = tree.calls[index].signature, tree.parents[index]
            if signature.transformed and index not in with_backward and (outer < 0 or outer in with_backward):
                self._warn(TRANSFORMED, signature.module)


def find_nonfinite(record: StepRecord, tree: CallTree) -> tuple[str, ...]:
    """Return the names of non-finite values: the loss, then the gradients of modules in the order of their backwards.

    A step without detail has no times of backwards; there the last module of the model comes first.
    """
    loss = record.values.get("loss")
    found = ["loss"] if isinstance(loss, float) and not isfinite(loss) else []
    if record.gradients is not None and not isfinite(record.gradients.total):
        bad = [module for module, norm in reversed(record.gradients.modules) if not isfinite(norm)]
        ends = _ends(tree) if bad else {}
        bad.sort(key=lambda module: ends.get(module, record.end_ns))
        found += [f"gradient {module.path}" for module in bad]
    return tuple(found[:MAX_NONFINITE_NAMES])


def _ends(tree: CallTree) -> dict[ModuleInfo, int]:
    """Return the end of each module's first backward; the start would order a container before its layers."""
    ends: dict[ModuleInfo, int] = {}
    for backward in tree.backwards:
        module = tree.calls[backward.call].signature.module
        ends[module] = min(backward.end_ns, ends.get(module, backward.end_ns))
    return ends
