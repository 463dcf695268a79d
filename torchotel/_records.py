"""Records that capture passes to the worker: plain values, without tensors, modules or autograd nodes."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from typing import Any, NamedTuple, Protocol, TypeAlias

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
    """Whether the module or a module inside it has parameters; True if unknown."""

    def __str__(self) -> str:
        return f"{self.type} `{self.path}` of {self.model}" if self.depth else self.model


Alignment: TypeAlias = tuple[int, int]
"""Names a step on all ranks: the collectives of the default process group before it, and the steps since the last."""


class ModelInfo(NamedTuple):
    """The model of the first step."""

    name: str
    modules: int
    parameters: int


@dataclass(frozen=True, slots=True, eq=False)
class CallSignature:
    """Properties that many calls of a module share. Compared by identity, so that exporters can cache its encoding.

    Shapes read `8x3x224x224`; containers are flattened in order, keyword arguments after positional ones.
    They are None if `shapes` is off.
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
    """The call is inside a transform of `torch.func` and has a gradient outside of it."""


PROCESS_ENDED_TYPE = "process_ended"
"""Type of the error of a process that ended without a shutdown, if nothing else is known."""


class Error(NamedTuple):
    """An exception that left a call, a backward or a step."""

    type: str
    message: str
    path: str | None = None
    """Path of the innermost module whose call raised, or ran as the process ended; None: unknown, or there was none."""


PROCESS_ENDS = frozenset((PROCESS_ENDED_TYPE, "oom_kill", "SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL"))
"""Types of the errors of processes that ended without a shutdown: no exception left the step."""
STALLED = "stalled"
"""Type of the error of a step or an evaluation that stalls."""


class CallNote(NamedTuple):
    """Rare properties of a call."""

    error: Error | None = None
    estimated: str | None = None
    """End of the span that is an upper bound: "end"."""
    recompute: bool = False
    """Activation checkpointing ran the module again inside of a backward."""
    span_id: int = 0
    """Id that was allocated while the call ran, because the program read the context; 0: none was."""
    lane: int = 0
    """Thread of a call that the step's thread waited for; such calls may overlap. 0: the thread of the step."""
    microbatch: tuple[int, int] | None = None
    """A pipeline's stage, and the number of the microbatch that the call is for."""


Slots: TypeAlias = int | tuple[int, ...]
"""Slots of the timestamps of a call's backward: one, or several if the call has several boundary nodes."""

NO_SLOTS: Slots = ()
NO_CLOCK = 0
"""Slot of a call that has no device time."""


class ModuleCall(NamedTuple):
    """One module call, recorded when it ends: children come before their parents."""

    signature: CallSignature
    start_ns: int
    end_ns: int
    starts: Slots
    """Slots whose earliest timestamp is the start of the call's backward."""
    ends: Slots
    """Slots whose latest timestamp is the end of the call's backward."""
    note: CallNote | None
    device_slot: int = NO_CLOCK
    """Slot of the forward's device time; `NO_CLOCK`: it has none."""


NodeTimestamp: TypeAlias = tuple[int, int, int]
"""Execution of an autograd node: its slot, the time in ns, the id of the graph task."""


class DeviceTimes(NamedTuple):
    """Times of calls on the clock of their device."""

    forwards_ns: Mapping[int, int]
    """Durations of forwards, by `ModuleCall.device_slot`."""
    clocks: Sequence[Sequence[NodeTimestamp]]
    """Timestamps of autograd nodes, one sequence for each device. The zero of a device's clock is arbitrary."""


class Phase(NamedTuple):
    """A time range of a step of one of the kinds in `PHASE_SPANS`; nested phases follow their parent."""

    kind: str
    start_ns: int
    end_ns: int
    error: Error | None = None
    optimizer: str | None = None
    """Class of the optimizer, if this is an optimizer phase."""
    estimated: str | None = None
    """ "end" if the end is an upper bound: the optimizer raised, and the phase ended with the next event."""
    span_id: int = 0
    """Id that was allocated while the phase ran, because the program read the context; 0: none was."""


class Registration(NamedTuple):
    """A module, parameter or buffer that was registered in a known module during a step."""

    time_ns: int
    path: str
    kind: str
    """module | parameter | buffer."""


class SpanReference(NamedTuple):
    """The context of a span: a current span of the program, or a span whose context was read while it ran."""

    trace_id: int
    span_id: int
    sampled: bool
    remote: bool = False
    state: str = ""
    """The span's `tracestate` (https://www.w3.org/TR/trace-context/#tracestate-header)."""
    other_flags: int = 0
    """The trace flags other than `sampled`, such as 0x02 for a random trace id."""


SUPPRESSED = SpanReference(0, 0, sampled=False)
"""Replaces a span of the program if instrumentation is suppressed: nothing that starts now is recorded."""


class GradientNorms(NamedTuple):
    """L2 norms of the gradients that the optimizer got: before clipping, unscaled, of this rank's part if sharded."""

    total: float
    """Over all parameters, each counted once; may be infinite or NaN."""
    modules: tuple[tuple[ModuleInfo, float], ...]
    """Over each module's own parameters, in the order of `Module.modules()`; may be infinite or NaN."""
    sharded: bool = False
    """Whether the squares of all ranks have to be added: each rank counts its own part."""


class Collective(NamedTuple):
    """A collective operation of a process group; times are those of the record."""

    operation: str
    """The function of `torch.distributed`."""
    group: str
    """Description of the process group, or its number."""
    ranks: int
    """Size of the group."""
    size_bytes: int
    """Size of the input tensors of this rank, or of the output tensors if there are none."""
    sequence: int
    """Number in its group, the same on all ranks; 0: unknown."""
    start_ns: int
    issued_ns: int
    """When the call had issued it."""
    done_ns: int
    """When it was done; 0: unknown, as on a device, or it was not done when the step was recorded."""
    modules: tuple[str, ...] = ()
    """The paths of the first modules whose gradients it reduces; empty: none, or unknown."""

    @property
    def end_ns(self) -> int:
        """Return when it was done, else when it was issued."""
        return self.done_ns or self.issued_ns


def uncovered_ns(intervals: Iterable[tuple[int, int]]) -> list[int]:
    """Return the time of each interval that no earlier one covers; the sum is the time in any of the intervals.

    Args:
        intervals: Starts and ends, in the order of the starts.
    """
    lengths = []
    covered_ns = 0
    for start_ns, end_ns in intervals:
        lengths.append(max(0, end_ns - max(start_ns, covered_ns)))
        covered_ns = max(covered_ns, end_ns)
    return lengths


def waits_ns(collectives: Sequence[Collective]) -> list[int]:
    """Return the time of each collective without the time of earlier ones that still run.

    The rank that the others wait for has the least of it.
    """
    return uncovered_ns((one.start_ns, one.end_ns) for one in collectives)


class TensorGradient(NamedTuple):
    """The gradient of a watched tensor."""

    time_ns: int
    name: str
    shape: str
    norm: float | None
    """L2 norm; None if it could not be read in time."""


class DeviceMemory(NamedTuple):
    """The memory of a device at the end of a step, in bytes."""

    device: str
    allocated: int
    reserved: int
    peak: int


LogValue: TypeAlias = str | bool | int | float


Baggage: TypeAlias = Mapping[str, object]
"""OpenTelemetry baggage: names and values that the program set in its context."""


class Log(NamedTuple):
    """Values that were logged after their step was recorded."""

    step: int
    """Number of the last step; -1: there is none."""
    unix_ns: int
    values: Mapping[str, LogValue]

    @property
    def kind(self) -> str:
        """Return "log"."""
        return "log"

    @property
    def detailed(self) -> bool:
        """Return False: it has no module calls."""
        return False

    def span_estimate(self) -> int:
        """Return 0: it makes no span."""
        return 0

    def record(self) -> "Log":
        """Return itself."""
        return self


@dataclass(slots=True)
class StepRecord:
    """A complete training step or evaluation, which capture passes to the worker."""

    kind: str
    """step | evaluation | data: a fetch without a step, whose ids the program had read | stall: a step or an evaluation
    that is still open, and of which only the trace and a line of the run file are made."""
    number: int
    """Each kind is counted from 0 in a process."""
    start_ns: int
    """The end of the previous step plus the time of evaluations since; of the first step, its first event."""
    end_ns: int
    unix_offset_ns: int
    """Difference between unix time and the times of this record."""
    thread: int
    detailed: bool
    reason: str | None = None
    """Why the record is detailed: first | sampled."""
    hooks_were_out: bool = False
    """Hooks were suspended because another thread was compiling; already warned."""
    user_span: SpanReference | None = None
    baggage: Baggage | None = None
    """The program's baggage when the step began, for span processors; not exported."""
    grad: bool = True
    """Whether a forward ran with gradients on. An evaluation without gradients belongs to the program's span."""
    training: bool = True
    """Whether a forward ran in training mode."""
    phases: Sequence[Phase] = ()
    calls: Sequence[ModuleCall] = ()
    timestamps: Sequence[NodeTimestamp] = ()
    registrations: Sequence[Registration] = ()
    error: Error | None = None
    identity: SpanReference | None = None
    """Context of the root span if it was allocated while the step ran."""
    alignment: Alignment | None = None
    """Of a step; None if there are no other ranks."""
    values: Mapping[str, LogValue] = field(default_factory=dict)
    """Logged values by name."""
    gradients: GradientNorms | None = None
    """None: norms were not computed."""
    tensor_gradients: Sequence[TensorGradient] = ()
    collectives: Sequence[Collective] = ()
    """In the order in which they were issued."""
    memory: Sequence[DeviceMemory] = ()
    device_times: Sequence[DeviceTimes] = ()
    gap_ns: int = 0
    """Time since the previous step that is not part of this step: over a minute, or capture was paused in it."""
    evaluated_ns: int = 0
    """Time of evaluations inside the step; no phase includes it."""
    folded: int = 0
    """Number of evaluations that are folded into this record."""
    folded_ns: int = 0
    """Time of the folded evaluations."""

    @property
    def counts_as_evaluation(self) -> bool:
        """Return whether this is an evaluation; a failed forward in training mode with gradients is part of a step."""
        return self.kind == "evaluation" and not (self.grad and self.training and self.error is not None)

    @property
    def between_ns(self) -> int:
        """Return the time from the end of the previous step to this step's first event, if it is part of the step."""
        first = self.phases[0] if self.phases else None
        return first.end_ns - first.start_ns if first is not None and first.kind == "between" else 0

    def span_estimate(self) -> int:
        """Estimate the number of spans of this record before they are built."""
        return 1 + len(self.phases) + len(self.calls) + (len(self.timestamps) + 1) // 2  # the first layer has no end

    def record(self) -> "StepRecord":
        """Return itself."""
        return self


Record: TypeAlias = StepRecord | Log
"""Input of the worker's pipeline."""


class Recordable(Protocol):
    """Item that capture passes to the worker: a record, or the parts of one."""

    @property
    def kind(self) -> str:
        """Return the kind of the `StepRecord`, or "log"."""

    @property
    def detailed(self) -> bool:
        """Return whether the record has module calls."""

    def span_estimate(self) -> int:
        """Estimate the number of spans before they are built."""

    def record(self) -> Record:
        """Return the record; called once."""


class PhaseLog(Protocol):
    """Gets the phases of a training thread while they run, for the case that the process ends during one of them."""

    def begin(self, kind: str, now_ns: int, *, grad: bool = True, alignment: Alignment | None = None) -> None:
        """Begin a phase, inside of the open ones; never raise.

        Args:
            kind: data | forward | backward | optimizer.
            now_ns: The time of `perf_counter_ns`.
            grad: Whether gradients are on.
            alignment: The alignment of its step; None if there are no other ranks, or if it is not known yet.
        """

    def end(self, kind: str, now_ns: int) -> None:
        """End the innermost open phase of a kind, and the phases inside of it; never raise."""

    def note_module(self, path: str) -> None:
        """Note the path of the innermost module call that runs, "" if it is unknown; never raise."""


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
    """Return for each phase the index of the innermost phase around it, -1 for none.

    Consecutive phases do not enclose each other, even if one of them takes no time.
    """
    found = [-1] * len(phases)
    if all(before.end_ns <= phase.start_ns for before, phase in pairwise(phases)):
        return found  # consecutive, as in most steps
    open_phases: list[int] = []
    for index in sorted(range(len(phases)), key=lambda i: (phases[i].start_ns, -phases[i].end_ns)):
        # A phase that ends before this phase can enclose no later phase that this phase does not enclose.
        while open_phases and phases[open_phases[-1]].end_ns < phases[index].end_ns:
            open_phases.pop()
        if open_phases:
            found[index] = open_phases[-1]
        open_phases.append(index)
    return found


def phase_times_s(record: StepRecord) -> dict[str, float]:
    """Return the self time of each kind of phase in seconds, and the rest of the step as "other".

    The time of evaluations inside the step is left out. A closure's forward inside of `optimizer.step` counts as
    forward, and an optimizer that steps inside of the backward counts as optimizer.
    """
    times_ns = dict.fromkeys(PHASE_SPANS, 0)
    parents = enclosing(record.phases)
    for phase, parent in zip(record.phases, parents, strict=True):
        length_ns = phase.end_ns - phase.start_ns
        times_ns[phase.kind] += length_ns
        if parent >= 0:
            times_ns[record.phases[parent].kind] -= length_ns
    times_ns["other"] = max(0, record.end_ns - record.start_ns - record.evaluated_ns - sum(times_ns.values()))
    return {kind: ns / 1e9 for kind, ns in times_ns.items()}


def phase_waits_s(record: StepRecord) -> dict[str, float]:
    """Return the time of collectives by the kind of the innermost phase that each begins in; see `waits_ns`."""
    waits_s: dict[str, float] = {}
    for collective, wait_ns in zip(record.collectives, waits_ns(record.collectives), strict=True):
        around = [one for one in record.phases if one.start_ns <= collective.start_ns <= one.end_ns]
        kind = max(around, key=lambda phase: phase.start_ns).kind if around else "other"
        waits_s[kind] = waits_s.get(kind, 0.0) + wait_ns / 1e9
    return waits_s


def plain(value: Any, *, finite: bool = False) -> Any:
    """Return a value in the types that JSON and `marshal` know: an object of another type becomes its `str`.

    Args:
        value: The value; a subclass of a plain type, such as an enum or a number of NumPy, becomes the plain type.
        finite: Whether a float that is not finite becomes None.
    """
    kind = type(value)
    if value is None or kind is str or kind is int or kind is bool or (kind is float and not finite):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # `str()` of an enum is its name
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item, finite=finite) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset | deque):
        return tuple(plain(item, finite=finite) for item in value)
    if isinstance(value, float) and finite and not isfinite(value):
        return None
    kinds = (kind for kind in (bool, int, float) if isinstance(value, kind))
    return next(kinds, str)(value)
