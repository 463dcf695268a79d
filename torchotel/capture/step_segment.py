"""The segments that steps and evaluations are built from."""

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from time import perf_counter_ns, time_ns
from typing import Any, Protocol, Self, TypeVar, cast

from torch.nn import Module

from torchotel._limits import MAX_BETWEEN_NS
from torchotel._records import (
    Alignment,
    Baggage,
    DeviceTimes,
    Error,
    LogValue,
    ModuleCall,
    NodeTimestamp,
    Phase,
    Registration,
    SpanReference,
    StepRecord,
    TensorGradient,
)
from torchotel.capture.async_readback import AsyncReadback
from torchotel.capture.collectives import OpenCollective
from torchotel.capture.gradient_norms import GradientState, NormsByOptimizer
from torchotel.capture.logged_values import Logged

T_co = TypeVar("T_co", covariant=True)

new_phase = cast("Callable[[type[Phase], tuple[Any, ...]], Phase]", tuple.__new__)
"""Makes a `Phase` without calling a Python function, since it is called at every event of every step."""


class Awaited(Protocol[T_co]):
    """A value that is computed on a device and read later."""

    def ready(self) -> bool:
        """Return whether the value is ready, without waiting."""

    def wait(self) -> None:
        """Wait until the value is ready."""

    def result(self) -> T_co:
        """Return the value."""


@dataclass(slots=True, eq=False)
class Identity:
    """The ids of a step's root, fixed when they are first asked for; the segments of a step share it."""

    reference: SpanReference | None = None
    unix_offset_ns: int = 0
    """Measured when the ids were fixed; used for all times of the step."""
    used: bool = False
    """A step has been recorded with it; segments that turn out to be other steps get other ids."""

    def claim(self) -> SpanReference | None:
        """Return the ids for the one step that they belong to."""
        used, self.used = self.used, True  # before the ids are read: another thread may fix them meanwhile
        return None if used else self.reference


@dataclass(slots=True, eq=False)
class StepSegment:
    """The events from one opening event (a fetch, a forward, …) to the next.

    A step has one segment or several: one per backward if gradients accumulate, one per network in a GAN.
    """

    start_ns: int
    end_ns: int
    fetched: bool = False
    explicit: bool = False
    """Opened by `torchotel.step()`: only the end of that block closes it."""
    user_span: SpanReference | None = None
    baggage: Baggage | None = None
    identity: Identity = field(default_factory=Identity)
    alignment: Alignment | None = None
    """Of the step that it begins or continues; None if there are no other ranks."""
    forward_id: int = 0
    """Span id of the open forward phase; 0 if it is not fixed."""
    ahead: int = 0
    """Steps that are expected to end before the one that this segment will belong to."""
    detailed: bool | None = None
    """None until the first forward."""
    forwards: int = 0
    forwards_with_grad: int = 0
    hooks_were_out: bool = False
    """Another thread compiled, so hooks were removed."""
    idle_since_ns: int = 0
    """End of the step before, plus the time of evaluations since; 0: no step came before."""
    paused: bool = False
    """Capture was paused since the step before."""
    opened_without_grad: bool = False
    """Opened by a forward with gradients off: an evaluation that ends with it."""
    evaluated: set[int] = field(default_factory=set)
    """The `id()`s of outermost modules that ran in evaluation mode with gradients on."""
    models: dict[int, weakref.ref[Module]] = field(default_factory=dict)
    """The outermost modules that ran with gradients on, by `id()`."""
    forward_start_ns: int | None = None
    forward_end_ns: int = 0
    error: Error | None = None
    backwards: int = 0
    optimizers: list[Hashable] = field(default_factory=list)
    finished: bool = False
    """Whether an optimizer has stepped."""
    trained: bool = False
    """Whether it belongs to a step: a backward ran or an optimizer stepped."""
    accumulates: bool = False
    """Whether a backward added to the gradients of parameters, as `torch.autograd.grad` does not."""
    phases: list[Phase] = field(default_factory=list)
    calls: Sequence[ModuleCall] = ()
    timestamps: Sequence[NodeTimestamp] = ()
    registrations: Sequence[Registration] = ()
    logged: Logged = field(default_factory=Logged)
    learning_rate: LogValue | AsyncReadback | None = None
    """The leading optimizer's learning rate, used if none is logged."""
    gradients: NormsByOptimizer = field(default_factory=dict)
    """Norms after the last backward, and as each optimizer got them."""
    read: dict[int, GradientState] | None = None
    """The state of each gradient when its norm was read, by `id()`; None: no norms were read."""
    watched: Sequence[Awaited[TensorGradient]] = ()
    collectives: Sequence[OpenCollective] = ()
    device_times: Awaited[DeviceTimes | None] | None = None

    def copy(self) -> Self:
        """Return a segment whose later phases and optimizers are not this one's."""
        return replace(self, phases=[*self.phases], optimizers=[*self.optimizers])

    @property
    def only_fetched(self) -> bool:
        """Whether it has run no forward and belongs to no step."""
        return not (self.forwards or self.trained)

    @property
    def evaluates(self) -> bool:
        """Whether it is an evaluation so far: it has run forwards, all without gradients."""
        return self.forwards > 0 and not self.grad

    @property
    def grad(self) -> bool:
        """Whether a forward ran with gradients on, or it belongs to a step."""
        return self.forwards_with_grad > 0 or self.trained

    @property
    def trains(self) -> bool:
        """Whether a forward with gradients on was of a model in training mode."""
        return not self.models.keys() <= self.evaluated

    @property
    def step_start_ns(self) -> int:
        """Start of a step whose first segment this is: the time since the step before it is part of the step."""
        return step_start_ns(self.start_ns, 0 if self.paused else self.idle_since_ns)

    @property
    def gap_ns(self) -> int:
        """Time since the step before, if it is longer than `MAX_BETWEEN_NS` or capture was paused in it; else 0."""
        has_gap = self.idle_since_ns and self.step_start_ns == self.start_ns
        return max(0, self.start_ns - self.idle_since_ns) if has_gap else 0

    def forward_ends(self, now_ns: int | None = None) -> None:
        """Close the forward phase, if one is open: at the backward's start, or with its last forward."""
        if self.forward_start_ns is not None:
            end_ns = self.forward_end_ns if now_ns is None else now_ns
            fields = "forward", self.forward_start_ns, end_ns, self.error, None, None, self.forward_id
            self.phases.append(new_phase(Phase, fields))
            self.forward_start_ns, self.forward_id = None, 0


def step_start_ns(first_event_ns: int, idle_since_ns: int) -> int:
    """Return when a step starts.

    Args:
        first_event_ns: When its first event was.
        idle_since_ns: End of the step before, plus the time of evaluations since; 0: no step came before.
    """
    between_ns = first_event_ns - idle_since_ns
    return idle_since_ns if idle_since_ns and 0 < between_ns <= MAX_BETWEEN_NS else first_event_ns


def build_record(
    kind: str,
    number: int,
    segments: Sequence[StepSegment],
    thread: int,
    identity: SpanReference | None,
    unix_offset_ns: int,
) -> StepRecord:
    """Put the segments of a step or an evaluation together.

    Args:
        kind: "step", "evaluation" or "data".
        number: How many of the kind there were before.
        segments: In order.
        thread: The id of the one that ran them.
        identity: The ids that were given out for it.
        unix_offset_ns: From the times of its segments to unix time.
    """
    first, *later = segments
    record = StepRecord(
        kind,
        number,
        first.start_ns,
        first.end_ns,
        unix_offset_ns,
        thread,
        detailed=bool(first.detailed),
        hooks_were_out=first.hooks_were_out,
        user_span=first.user_span,
        baggage=first.baggage,
        grad=first.grad,
        training=first.trains,
        phases=tuple(first.phases) if kind != "data" else (),  # there the root is the fetch
        calls=first.calls,
        timestamps=first.timestamps,
        registrations=first.registrations,
        error=first.error,
        identity=identity,
        alignment=first.alignment if kind == "step" else None,
    )
    for before, segment in pairwise(segments):
        _merge_segment(record, segment)
        record.evaluated_ns += max(0, segment.idle_since_ns - before.end_ns)
    if later:
        _join_lists(record, segments)
    if kind == "step":
        record.start_ns, record.gap_ns = first.step_start_ns, first.gap_ns
        if record.start_ns < first.start_ns:
            record.phases = (Phase("between", record.start_ns, first.start_ns), *record.phases)
    return record


def _join_lists(record: StepRecord, segments: Sequence[StepSegment]) -> None:
    """Set the record's lists from those of several segments; there may be hundreds of them."""
    record.phases = [phase for segment in segments for phase in segment.phases]
    record.calls = [call for segment in segments for call in segment.calls]
    record.timestamps = [timestamp for segment in segments for timestamp in segment.timestamps]
    record.registrations = [registration for segment in segments for registration in segment.registrations]


def _merge_segment(record: StepRecord, segment: StepSegment) -> None:
    """Merge a later segment of the same step, except its lists."""
    record.end_ns = max(record.end_ns, segment.end_ns)
    record.detailed = record.detailed or bool(segment.detailed)
    record.hooks_were_out = record.hooks_were_out or segment.hooks_were_out
    record.grad = record.grad or segment.grad
    record.error = record.error or segment.error


CLOSE_NS = 10_000
TRIES = 5


def unix_offset_ns() -> int:
    """Return the offset from `perf_counter_ns` to unix time.

    Another thread may run for milliseconds between the two clock readings, and the step would seem to begin before the
    last one ended. The clocks are then read again, and the readings that are closest together are used.
    """
    closest_ns, offset_ns = -1, 0
    for _ in range(TRIES):
        before_ns, unix_ns, after_ns = perf_counter_ns(), time_ns(), perf_counter_ns()
        apart_ns = after_ns - before_ns
        if closest_ns < 0 or apart_ns < closest_ns:
            closest_ns, offset_ns = apart_ns, unix_ns - (before_ns + after_ns) // 2
        if apart_ns < CLOSE_NS:
            break
    return offset_ns
