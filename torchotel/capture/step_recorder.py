"""From the segments that step detectors find to numbered records that are handed over."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from torchotel._records import SUPPRESSED, Baggage, SpanReference
from torchotel.capture.pending_records import HandOver, PendingLog, PendingRecord

if TYPE_CHECKING:
    from torchotel.capture.cuda import Memory
    from torchotel.capture.gradient_norms import Gradients
    from torchotel.capture.step_segment import StepSegment
    from torchotel.capture.thread_state import ThreadState
    from torchotel.sampling.detail import Detail


class RecordOutput:
    """Number the records of all threads and hand them over.

    Args:
        hand_over: Gets each finished record, on the thread that ran it.
        detail: Tells why a record has its detail.
        gradients: Reads norms after a loss that is not finite.
        memory: Reads the memory of devices at the end of a step.
        user_span: Returns the user's span that is current on the calling thread.
        baggage: Returns the program's baggage on the calling thread, None if it is empty.
        on_first: Called before the first record of each kind is handed over, on the thread that ran it.
    """

    def __init__(
        self,
        hand_over: HandOver,
        detail: Detail,
        gradients: Gradients,
        memory: Memory,
        user_span: Callable[[], SpanReference | None],
        baggage: Callable[[], Baggage | None],
        on_first: Callable[[], None],
    ) -> None:
        self._next, self._detail, self._gradients, self._memory = hand_over, detail, gradients, memory
        self.user_span, self.baggage, self._on_first = user_span, baggage, on_first
        self.numbers = {"step": 0, "evaluation": 0, "data": 0}
        """How many records of each kind were made."""
        self._numbering = threading.RLock()  # reentrant: a signal's handler may end a step while it is held

    def hand_over(self, pending: PendingRecord | PendingLog) -> None:
        """Hand a record over."""
        if pending.logged.loss_is_bad():
            self._gradients.note_bad_loss(self.numbers["step"])
        self._next(pending)

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
        self.user_span, self.baggage = output.user_span, output.baggage

    def on_segment_begin(self) -> None:
        """Hand over finished steps: values that are logged from now on belong to the next step."""
        self._thread.pending.release(self._output.hand_over)

    def on_segment_end(self, segment: StepSegment) -> None:
        """Move the records since the last segment into the segment that ends."""
        self._thread.drain_into(segment)

    def on_record(self, kind: str, segments: list[StepSegment]) -> None:
        """Number a record, and hand it over unless values may still be logged to it."""
        thread = self._thread
        if segments[0].user_span is SUPPRESSED:
            PendingRecord(kind, -1, segments, thread.ident).close()
            return
        thread.pending.add(self._output.make_record(kind, segments, thread.ident))
        if kind != "step" or thread.step_detector.in_step:  # the next event of the thread may be far off
            thread.pending.release(self._output.hand_over)
