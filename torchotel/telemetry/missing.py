"""What a trace lacks that its user may look for, told once."""

from __future__ import annotations

from collections.abc import Callable

from torchotel._records import CallSite, Unit
from torchotel._warn import Warn
from torchotel.telemetry.timing import Timed

SURE = 3
"""Steps of a thread after which it is told; the first may have begun before `instrument()`."""

NO_FORWARD = (
    "steps run a backward, and before it no module with parameters on their thread: their forward is a function, "
    "perhaps a compiled one, is a `forward` that is called by its name, or ran on another thread. Call the model "
    "itself, and compile it rather than the function, to see its spans"
)
TRANSFORMED = (
    "%s runs inside a transform of torch.func, and a backward outside of the transform: there it can't be seen, so it "
    "has no backward span, and its time is that of the module around. A backward that torch.func.grad runs is seen"
)

NO_MODULE = (
    "none of the modules that are called has spans, %s among them: `include`, `exclude` or `max_depth` leaves out all. "
    "A pattern stands for whole paths, and `*` in it for anything, dots too: `*.attention`, `layers.0.*`"
)


class Missing:
    """Look what steps lack.

    Args:
        warn: Called with what the user is to know.
        shows: Tells whether calls like one have spans.
    """

    def __init__(self, warn: Warn, shows: Callable[[CallSite], bool]) -> None:
        self._warn, self._shows = warn, shows
        self._shown = False
        """A call had a span."""
        self._without_spans = 0
        """Steps whose calls had none, until then."""
        self._forward_seen: set[int] = set()
        """Threads that have called a module with parameters in a step."""
        self._without: dict[int, int] = {}
        """Steps of each other thread."""

    def look(self, unit: Unit, timed: Timed) -> None:
        """Take in a step or an evaluation, and its calls."""
        if unit.calls and not self._shown:
            self._look_for_spans(unit)
        kinds = {phase.kind for phase in unit.phases}
        if "backward" not in kinds or unit.hooks_were_out:
            return
        if unit.thread not in self._forward_seen and (unit.detailed or "forward" not in kinds):
            self._look_for_forward(unit)
        if any(call.site.transformed for call in unit.calls):
            self._look_for_backwards(timed)

    def _look_for_spans(self, unit: Unit) -> None:
        self._shown = any(self._shows(call.site) for call in unit.calls)
        self._without_spans += not self._shown
        if self._without_spans == SURE:
            self._warn(NO_MODULE, unit.calls[0].site.module)

    def _look_for_forward(self, step: Unit) -> None:
        if any(call.site.module.holds_parameters for call in step.calls):
            self._forward_seen.add(step.thread)
            return
        number = self._without[step.thread] = self._without.get(step.thread, 0) + 1
        if number == SURE:
            self._warn(NO_FORWARD)

    def _look_for_backwards(self, timed: Timed) -> None:
        """Look for calls inside a transform that a backward went around, not through."""
        went_through = {run.call for run in timed.runs}
        for index in range(timed.own, len(timed.calls)):
            site, outer = timed.calls[index].site, timed.parents[index]
            if site.transformed and index not in went_through and (outer < 0 or outer in went_through):
                self._warn(TRANSFORMED, site.module)
