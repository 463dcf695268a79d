"""Finished steps, held until their numbers are read and no more values can be logged to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from torchotel._records import DeviceMemory, Log, StepRecord
from torchotel.capture.gradient_norms import step_norms
from torchotel.capture.logged_values import Logged
from torchotel.capture.step_segment import StepSegment, build_record, unix_offset_ns

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
        """Return whether all values can be read; an evaluation does not wait for device times."""
        for segment in self._segments:
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
