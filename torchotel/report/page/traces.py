"""Choose the steps whose spans are shown one by one: the slowest and a median step; pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchotel import _names as names
from torchotel.report.read import SpanLine
from torchotel.report.times import WARM_UP_STEPS

_MOST_DEVICES = 64
_MOST_SPANS = 20_000
"""Of one trace; torchotel writes 2,000 by default, a stranger any number."""


@dataclass(frozen=True)
class StepTrace:
    """One step with its spans."""

    number: int
    duration_s: float
    detailed: bool
    """Whether it has spans of modules."""
    root: SpanLine
    spans: Sequence[SpanLine]
    """All of them, the root included."""


@dataclass
class Traces:
    """Take in the spans of a run, and keep those of three steps; a trace is written in one piece.

    Args:
        median_s: How long a step takes.
    """

    median_s: float
    slowest: StepTrace | None = None
    slowest_later: StepTrace | None = None
    """Without the first steps."""
    median: StepTrace | None = None
    """The one whose time is closest to the median; one with detail where there is any."""
    detailed: int = 0
    """Steps whose modules could be read: the spans of others were deleted, or left out by a sampler."""
    devices: set[str] = field(default_factory=set)
    """Those that modules ran on."""
    _open: list[SpanLine] = field(default_factory=list)

    def add(self, span: SpanLine) -> None:
        """Take in a span."""
        if self._open and self._open[0].trace_id != span.trace_id:
            self.close()
        device = span.attributes.get(names.DEVICE)
        if isinstance(device, str) and len(self.devices) < _MOST_DEVICES:
            self.devices.add(device)
        if len(self._open) < _MOST_SPANS:
            self._open.append(span)

    def close(self) -> None:
        """Take the spans so far for a whole trace."""
        step = _step(self._open)
        self._open = []
        if step is None:
            return
        self.detailed += step.detailed
        self.slowest = _better(self.slowest, step, lambda one: one.duration_s)
        if step.number >= WARM_UP_STEPS:
            self.slowest_later = _better(self.slowest_later, step, lambda one: one.duration_s)
        self.median = _better(self.median, step, lambda one: (one.detailed, -abs(one.duration_s - self.median_s)))

    def chosen(self) -> Sequence[tuple[str, StepTrace]]:
        """Name the steps to show, slowest first; the slowest after the first ones too, where that is another."""
        found = [("Slowest step", self.slowest)]
        if self.slowest is not self.slowest_later:
            found.append((f"Slowest step after the first {WARM_UP_STEPS}", self.slowest_later))
        found.append(("Median step", self.median))
        return [(title, step) for title, step in found if step is not None]


def _better(
    known: StepTrace | None, new: StepTrace, rank: Callable[[StepTrace], tuple[bool, float] | float]
) -> StepTrace:
    return new if known is None or rank(new) > rank(known) else known  # type: ignore[operator] # one kind of rank a call


def _step(spans: Sequence[SpanLine]) -> StepTrace | None:
    root = next((span for span in spans if span.name == names.SPAN_STEP), None)
    if root is None:
        return None
    number = root.attributes.get(names.STEP_NUMBER)
    return StepTrace(
        number=number if isinstance(number, int) else 0,
        duration_s=max(0, root.end_ns - root.start_ns) / 1e9,
        detailed=any(names.MODULE_TYPE in span.attributes for span in spans),
        root=root,
        spans=spans,
    )
