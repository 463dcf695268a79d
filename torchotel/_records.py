"""The records that capture hands over: plain values, without tensors, modules or autograd nodes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, Protocol, TypeAlias

from torchotel import _semconv as names


@dataclass(frozen=True, slots=True, eq=False)
class ModuleInfo:
    """A living module's name. Compared by identity: capture makes one for each module and path."""

    model: str
    """Name that the program gave the model, else class of its root; `-2` … for further living ones of that name."""
    path: str
    """Qualified name with wrappers stripped; the root's is its class."""
    type: str
    """Class name."""
    parameters: int
    """Elements owned by the module itself."""
    depth: int
    """Components of the path; the root is 0."""
    holds_parameters: bool = True
    """Whether it, or a module that it holds, has any; True where that can't be told."""

    def __str__(self) -> str:
        return f"{self.type} `{self.path}` of {self.model}" if self.depth else self.model


class ModelInfo(NamedTuple):
    """The model of the first step."""

    name: str
    modules: int
    parameters: int


@dataclass(frozen=True, slots=True, eq=False)
class CallSignature:
    """What many calls of one module have in common. Compared by identity, so that its encoding can be kept.

    Shapes read `8x3x224x224`; containers are flattened in order, keyword arguments after positional ones.
    They are None where shapes are switched off.
    """

    module: ModuleInfo
    input_shapes: tuple[str, ...] | None
    output_shapes: tuple[str, ...] | None
    input_dtypes: tuple[str, ...] | None
    output_dtypes: tuple[str, ...] | None
    grad_input_shapes: tuple[str, ...] | None
    grad_output_shapes: tuple[str, ...] | None
    device: str
    training: bool
    grad_enabled: bool
    compiled: bool
    """A compiled region: it has no inner spans."""
    transformed: bool = False
    """Called inside a transform of `torch.func`, with a gradient outside of it."""


class Error(NamedTuple):
    """An exception that left a call, a backward or a step."""

    type: str
    message: str
    path: str | None = None
    """Path of the innermost module whose call raised; None: unknown, or no module call raised."""


class CallNote(NamedTuple):
    """What is rare about a call."""

    error: Error | None = None
    estimated: str | None = None
    """Which end of the span is an upper bound: "end"."""
    recompute: bool = False
    """Run again inside a backward by activation checkpointing."""
    span_id: int = 0
    """Given out while the call ran, because its context was asked for; 0: not yet."""
    lane: int = 0
    """The thread that it ran on, where another one waited for it: such calls may overlap. 0: that of the step."""


Slots: TypeAlias = int | tuple[int, ...]
"""Where the stamps of a call's backward are found: a number, or several where it has several boundary nodes."""

NO_SLOTS: Slots = ()
NO_CLOCK = 0
"""Slot of a call that has no device time."""


class ModuleCall(NamedTuple):
    """One module call, handed over when it ends: children stand before their parents."""

    site: CallSignature
    start_ns: int
    end_ns: int
    starts: Slots
    """Stamps whose earliest is the start of the call's backward."""
    ends: Slots
    """Stamps whose latest is its end."""
    note: CallNote | None
    device_slot: int = NO_CLOCK
    """Where the time of its forward on its device is found; `NO_CLOCK`: nowhere."""


NodeTimestamp: TypeAlias = tuple[int, int, int]
"""A node of the autograd graph ran: its slot, the time in ns, the graph task."""


class DeviceTimes(NamedTuple):
    """What calls took on the clock of their device."""

    forwards_ns: Mapping[int, int]
    """Of forwards, by `ModuleCall.device_slot`."""
    clocks: Sequence[Sequence[NodeTimestamp]]
    """When nodes of the graph ran, each sequence by one device's clock: from any moment, and maybe before it."""


class Phase(NamedTuple):
    """A stretch of a step: between, data, forward, backward or optimizer; nested ones follow their parent."""

    kind: str
    start_ns: int
    end_ns: int
    error: Error | None = None
    optimizer: str | None = None
    """Class of the optimizer, for its phase."""
    estimated: str | None = None
    """ "end" where it is an upper bound: the optimizer raised, and the next event found it."""
    span_id: int = 0
    """Given out while it ran, because its context was asked for; 0: not yet."""


class Registration(NamedTuple):
    """A module, parameter or buffer that came to a known module while a step ran."""

    time_ns: int
    path: str
    kind: str
    """module | parameter | buffer."""


class SpanReference(NamedTuple):
    """The ids of a span: a user's that was current, or one of ours that was asked for while it ran."""

    trace_id: int
    span_id: int
    sampled: bool
    remote: bool = False
    state: str = ""
    """The `tracestate` that goes with it (https://www.w3.org/TR/trace-context/#tracestate-header)."""


SUPPRESSED = SpanReference(0, 0, sampled=False)
"""In place of a user's span: the program has suppressed instrumentation, and nothing that begins now is recorded."""


class GradientNorms(NamedTuple):
    """L2 norms of the gradients that the optimizer got: before clipping, unscaled, of this rank's shard if sharded."""

    total: float
    """Over all parameters, each counted once; it may be infinite or not a number, as those of modules."""
    modules: tuple[tuple[ModuleInfo, float], ...]
    """Over each module's own parameters, in the order of the model's modules."""


class TensorGradient(NamedTuple):
    """The gradient of a tensor that the user watches."""

    time_ns: int
    name: str
    shape: str
    norm: float | None
    """L2; None where it could not be read in time."""


class DeviceMemory(NamedTuple):
    """The memory of a device at the end of a step, in bytes."""

    device: str
    allocated: int
    reserved: int
    peak: int


LogValue: TypeAlias = str | bool | int | float


Baggage: TypeAlias = Mapping[str, object]
"""OpenTelemetry's baggage: names and values that the program put into its context; never changed."""


class Log(NamedTuple):
    """What was logged when its step had been handed over."""

    step: int
    """Number of the last step; -1: there was none yet."""
    unix_ns: int
    values: Mapping[str, LogValue]


@dataclass(slots=True)
class StepRecord:
    """One training step or one evaluation, whole: what capture hands to the worker."""

    kind: str
    """step | evaluation | data: a fetch that nothing came of, whose ids were given out all the same."""
    number: int
    """Each kind is counted from 0, for itself, over the process."""
    start_ns: int
    """Of a step: the end of the step before, later by the time of evaluations since; of the first: its first event."""
    end_ns: int
    unix_offset_ns: int
    """Added to a time of this record it gives unix time."""
    thread: int
    detailed: bool
    reason: str | None = None
    """Why it has its detail: first | sampled."""
    hooks_were_out: bool = False
    """Another thread compiled while it ran: what it lacks for that has been told of."""
    user_span: SpanReference | None = None
    baggage: Baggage | None = None
    """The program's when the step began, for span processors; None: there was none. It is not exported."""
    grad: bool = True
    """Whether a forward ran with gradients on; an evaluation without is part of the user's span from the start."""
    training: bool = True
    """Whether one of these forwards was of a model in training mode."""
    phases: Sequence[Phase] = ()
    calls: Sequence[ModuleCall] = ()
    stamps: Sequence[NodeTimestamp] = ()
    registrations: Sequence[Registration] = ()
    error: Error | None = None
    identity: SpanReference | None = None
    """The ids of its root, where they were given out while it ran."""
    values: Mapping[str, LogValue] = field(default_factory=dict)
    """What was logged: loss, lr, samples, tokens, epoch, and whatever else by its own name."""
    gradients: GradientNorms | None = None
    """None: not looked at."""
    tensor_gradients: Sequence[TensorGradient] = ()
    memory: Sequence[DeviceMemory] = ()
    device_times: Sequence[DeviceTimes] = ()
    gap_ns: int = 0
    """Time since the step before that is not part of the step: over a minute, or capture was paused in it."""
    evaluated_ns: int = 0
    """Time of evaluations inside the step, which is in none of its phases."""
    folded: int = 0
    """Evaluations that this one stands for."""
    folded_ns: int = 0
    """Their time."""

    @property
    def counts_as_evaluation(self) -> bool:
        """Whether it is counted as an evaluation: a failed forward in training mode with gradients on is not."""
        return self.kind == "evaluation" and not (self.grad and self.training and self.error is not None)

    @property
    def between_ns(self) -> int:
        """Time from the end of the step before to this step's first event, as far as it is part of the step."""
        first = self.phases[0] if self.phases else None
        return first.end_ns - first.start_ns if first is not None and first.kind == "between" else 0

    def span_estimate(self) -> int:
        """Count the spans that this record would make, to weigh it before it is built."""
        return 1 + len(self.phases) + len(self.calls) + len(self.stamps) // 2

    def record(self) -> "StepRecord":
        """Return itself."""
        return self


Record: TypeAlias = StepRecord | Log
"""What the worker reads."""


class Recordable(Protocol):
    """What capture hands to the worker: a record, or what one is put together from."""

    @property
    def kind(self) -> str:
        """That of a `StepRecord`, or log."""

    @property
    def detailed(self) -> bool:
        """Whether it has its calls."""

    def span_estimate(self) -> int:
        """Count the spans that it would make, to weigh it before it is built."""

    def record(self) -> Record:
        """Return the record; to be called once."""


PHASE_SPANS = {
    "between": names.SPAN_BETWEEN,
    "data": names.SPAN_DATA,
    "forward": names.SPAN_FORWARD,
    "backward": names.SPAN_BACKWARD,
    "optimizer": names.SPAN_OPTIMIZER,
}
"""Kinds of phases and the names of their spans, in the order of a step."""
PHASES = (*PHASE_SPANS, "other")
"""What a step's time is divided into; "other" is the time in no phase."""


def enclosing(phases: Sequence[Phase]) -> list[int]:
    """For each phase the index of the innermost one that holds it, -1 for none.

    Where they follow one another none holds another, not even one that takes no time at its edge.
    """
    found = [-1] * len(phases)
    if all(before.end_ns <= phase.start_ns for before, phase in pairwise(phases)):
        return found  # one after the other, as in most steps
    open_phases: list[int] = []
    for index in sorted(range(len(phases)), key=lambda i: (phases[i].start_ns, -phases[i].end_ns)):
        # One that ends before this one does holds nothing that begins later and is not in this one too.
        while open_phases and phases[open_phases[-1]].end_ns < phases[index].end_ns:
            open_phases.pop()
        if open_phases:
            found[index] = open_phases[-1]
        open_phases.append(index)
    return found


def phase_times_s(unit: StepRecord) -> dict[str, float]:
    """Return the self time of each kind of phase in seconds, and what is left of the step as "other".

    The time of evaluations inside the step is in none.
    A closure's forward inside the optimizer's step counts as forward, an optimizer that steps inside the
    backward as optimizer.
    """
    times_ns = dict.fromkeys(PHASE_SPANS, 0)
    parents = enclosing(unit.phases)
    for phase, parent in zip(unit.phases, parents, strict=True):
        length_ns = phase.end_ns - phase.start_ns
        times_ns[phase.kind] += length_ns
        if parent >= 0:
            times_ns[unit.phases[parent].kind] -= length_ns
    times_ns["other"] = max(0, unit.end_ns - unit.start_ns - unit.evaluated_ns - sum(times_ns.values()))
    return {kind: ns / 1e9 for kind, ns in times_ns.items()}
