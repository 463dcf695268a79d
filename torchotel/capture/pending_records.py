"""Finished steps: their numbers, and the wait until values are read and no more can be logged to them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from torchotel._records import SUPPRESSED, Alignment, Baggage, DeviceMemory, Log, SpanReference, StepRecord
from torchotel.capture.gradient_norms import step_norms
from torchotel.capture.logged_values import Logged
from torchotel.capture.step_alignment import StepAlignment
from torchotel.capture.step_segment import StepSegment, build_record, unix_offset_ns

if TYPE_CHECKING:
    from torchotel.capture.collectives import Collectives
    from torchotel.capture.cuda import Memory
    from torchotel.capture.gradient_norms import Gradients
    from torchotel.capture.thread_state import ThreadState
    from torchotel.sampling.detail import Detail

MAX_WAITING = 2

HandOver: TypeAlias = Callable[["PendingRecord | PendingLog"], None]


class PendingRecord:
    """The segments of a step, an evaluation or a fetch, until the worker builds the record.

    The training thread does not build it: calling more functions there evicts its instruction cache.

    Args:
        kind: "step", "evaluation" or "data".
        number: The record's number among those of its kind.
        segments: The segments, in order.
        thread: The id of the thread that ran them.
        reason: Why the record has detail.
        memory: The memory of devices at its end.
    """

    __slots__ = (
        "_identity",
        "_memory",
        "_number",
        "_reason",
        "_segments",
        "_thread",
        "_unix_offset_ns",
        "kind",
        "logged",
    )  # fmt: skip

    def __init__(
        self,
        kind: str,
        number: int,
        segments: Sequence[StepSegment],
        thread: int,
        reason: str | None = None,
        memory: Sequence[DeviceMemory] = (),
    ) -> None:
        self.kind, self._number, self._segments, self._thread = kind, number, segments, thread
        self._reason, self._memory = reason, memory
        first = segments[0]
        self.logged, rate, identity = first.logged, first.learning_rate, first.identity
        if len(segments) > 1:
            identity = next(
                (segment.identity for segment in segments if segment.identity.reference is not None), identity
            )
            for segment in segments[1:]:
                rate = rate if segment.learning_rate is None else segment.learning_rate
                self.logged.merge(segment.logged)
        self._unix_offset_ns = identity.unix_offset_ns or unix_offset_ns()
        self._identity = identity.claim()
        if rate is not None:
            self.logged.learning_rate(rate)

    def ready(self) -> bool:
        """Return whether all values can be read; an evaluation waits for no device times and ends of collectives."""
        for segment in self._segments:
            if segment.collectives and self.kind == "step" and not all(one.ready() for one in segment.collectives):
                return False
            if segment.gradients and not all(norms.ready() for norms in segment.gradients.values()):
                return False
            if segment.device_times is not None and not segment.device_times.ready() and self.kind == "step":
                return False  # the record of a request does not wait for the next request
            if segment.watched and not all(gradient.ready() for gradient in segment.watched):
                return False
        return self.logged.ready()

    def wait(self) -> None:
        """Wait until all values can be read."""
        self.logged.wait()
        for segment in self._segments:
            for awaited in (*segment.gradients.values(), *segment.watched, segment.device_times):
                if awaited is not None:
                    awaited.wait()

    def close(self) -> None:
        """Close the log, and drop device times that are not ready."""
        self.logged.closed = True
        for segment in self._segments:
            if segment.device_times is not None:
                segment.device_times.result()  # returns the events to their pool

    @property
    def detailed(self) -> bool:
        """Whether the record has module calls."""
        return any(segment.detailed for segment in self._segments)

    def span_estimate(self) -> int:
        """Estimate the number of spans, before the record is built."""
        if self.kind == "data":
            return 1  # the fetch
        first = self._segments[0]
        spans = 1 + (self.kind == "step" and first.step_start_ns < first.start_ns)
        for segment in self._segments:
            spans += len(segment.collectives) if self.detailed else 0
            spans += len(segment.phases) + len(segment.calls) + (len(segment.timestamps) + 1) // 2
        return spans

    def record(self) -> StepRecord:
        """Build the record, with the values that are ready."""
        segments = self._segments
        record = build_record(self.kind, self._number, segments, self._thread, self._identity, self._unix_offset_ns)
        record.reason, record.memory = self._reason, self._memory
        record.values = self.logged.values()
        record.gradients = step_norms([segment.gradients for segment in segments])
        record.tensor_gradients = [gradient.result() for segment in segments for gradient in segment.watched]
        record.collectives = [one.record() for segment in segments for one in segment.collectives]
        times = [segment.device_times.result() for segment in segments if segment.device_times is not None]
        record.device_times = [one for one in times if one is not None]
        return record


class PendingLog:
    """Values that were logged after their step was handed over.

    Args:
        log: The record without values.
        logged: The values.
    """

    __slots__ = ("_log", "logged")

    kind = "log"
    detailed = False

    def __init__(self, log: Log, logged: Logged) -> None:
        self._log, self.logged = log, logged

    def ready(self) -> bool:
        """Return whether all values can be read."""
        return self.logged.ready()

    def wait(self) -> None:
        """Wait until all values can be read."""
        self.logged.wait()

    def close(self) -> None:
        """Close the log."""
        self.logged.closed = True

    def span_estimate(self) -> int:
        """Return 0: a log makes no span."""
        return 0

    def record(self) -> Log:
        """Build the record, with the values that are ready."""
        return self._log._replace(values=self.logged.values())


class PendingRecords:
    """The records of one thread, in order; at most two of them wait for their values."""

    def __init__(self) -> None:
        self._pending: deque[PendingRecord | PendingLog] = deque()

    def add(self, pending: PendingRecord | PendingLog) -> None:
        """Append a record."""
        self._pending.append(pending)

    def last_step(self) -> Logged | None:
        """Return the log of the last step, None if it was handed over."""
        for pending in reversed(self._pending):
            if pending.kind == "step":
                return pending.logged
        return None

    def release(self, hand_over: HandOver) -> None:
        """Hand over ready records in order, and the oldest one if too many wait."""
        while self._pending:
            waiting = list(self._pending)  # a signal handler may flush meanwhile
            if not waiting or not (waiting[0].ready() or len(waiting) > MAX_WAITING):
                return
            self._hand_over_first(hand_over, wait=False)

    def release_all(self, hand_over: HandOver) -> None:
        """Wait for all values and hand over all records."""
        while self._pending:
            self._hand_over_first(hand_over, wait=True)

    def _hand_over_first(self, hand_over: HandOver, *, wait: bool) -> None:
        try:
            pending = self._pending.popleft()
        except IndexError:
            return
        if wait:
            pending.wait()
        pending.close()
        hand_over(pending)


class RecordOutput:
    """Number the records of all threads and hand them over.

    Args:
        hand_over: Gets each finished record, on the thread that ran it.
        detail: Tells why a record has its detail.
        gradients: Reads norms after a loss that is not finite.
        memory: Reads the memory of devices at the end of a step.
        user_span: Returns the user's span that is current on the calling thread.
        baggage: Returns the program's baggage on the calling thread, None if it is empty.
        collectives: Records the collectives of all process groups.
        on_first: Called before the first record of each kind is handed over, on the thread that ran it.
        on_group: Called when a step begins with another default process group than the last step.
    """

    def __init__(
        self,
        hand_over: HandOver,
        detail: Detail,
        gradients: Gradients,
        memory: Memory,
        user_span: Callable[[], SpanReference | None],
        baggage: Callable[[], Baggage | None],
        collectives: Collectives,
        on_first: Callable[[], None],
        on_group: Callable[[], None],
    ) -> None:
        self._next, self._detail, self._gradients, self._memory = hand_over, detail, gradients, memory
        self.user_span, self.baggage, self.collectives, self._on_first = user_span, baggage, collectives, on_first
        self._alignment = StepAlignment(on_group)
        self.numbers = {"step": 0, "evaluation": 0, "data": 0}
        """How many records of each kind were made."""
        self._numbering = threading.RLock()  # reentrant: a signal's handler may end a step while it is held

    def hand_over(self, pending: PendingRecord | PendingLog) -> None:
        """Hand a record over."""
        if pending.logged.loss_is_bad():
            self._gradients.note_bad_loss(self.numbers["step"])
        self._next(pending)

    def alignment(self, ahead: int) -> Alignment | None:
        """Return the alignment of a step that begins now, after `ahead` further ones."""
        return self._alignment.of_step(self.numbers["step"] + ahead)

    def make_record(self, kind: str, segments: list[StepSegment], thread: int) -> PendingRecord:
        """Make the record of a step, an evaluation or a fetch, with the next number of its kind."""
        with self._numbering:
            number = self.numbers[kind]
            self.numbers[kind] = number + 1
        if not number:
            self._on_first()
        reason = self._detail.reason(number) if True in [segment.detailed for segment in segments] else None
        memory = self._memory.read() if kind == "step" else ()
        return PendingRecord(kind, number, segments, thread, reason, memory)


class StepRecorder:
    """The `StepListener` of one thread's step detector.

    Args:
        thread: The thread's state.
        output: Numbers the records and hands them over.
    """

    def __init__(self, thread: ThreadState, output: RecordOutput) -> None:
        self._thread, self._output = thread, output
        self.user_span, self.baggage, self.alignment = output.user_span, output.baggage, output.alignment

    def on_segment_begin(self) -> None:
        """Hand over finished steps: values that are logged from now on belong to the next step."""
        self._thread.pending.release(self._output.hand_over)
        self._output.collectives.watch_new_groups()

    def on_segment_end(self, segment: StepSegment) -> None:
        """Move the records since the last segment into the segment that ends."""
        self._thread.drain_into(segment)
        collectives = self._output.collectives
        segment.collectives = collectives.take(segment.end_ns)
        if segment.detailed:
            collectives.buckets.name(segment.collectives, segment.phases, list(segment.models.values()))

    def on_record(self, kind: str, segments: list[StepSegment]) -> None:
        """Number a record, and hand it over unless values may still be logged to it."""
        thread = self._thread
        if segments[0].user_span is SUPPRESSED:
            PendingRecord(kind, -1, segments, thread.ident).close()
            return
        thread.pending.add(self._output.make_record(kind, segments, thread.ident))
        if kind != "step" or thread.step_detector.in_step:  # the next event of the thread may be far off
            thread.pending.release(self._output.hand_over)
