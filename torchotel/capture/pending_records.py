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
        number: How many of the kind there were before.
        segments: In order.
        thread: The id of the one that ran them.
        reason: Why it has its detail.
        memory: That of devices at its end.
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
        """Tell whether all of it can be read, and that of an evaluation which it must not wait for."""
        for segment in self._segments:
            if segment.gradients and not all(norms.ready() for norms in segment.gradients.values()):
                return False
            if segment.device_times is not None and not segment.device_times.ready() and self.kind == "step":
                return False  # the trace of a request does not wait for the next request
            if segment.watched and not all(gradient.ready() for gradient in segment.watched):
                return False
        return self.logged.ready()

    def wait(self) -> None:
        """Wait until it can."""
        self.logged.wait()
        for segment in self._segments:
            for awaited in (*segment.gradients.values(), *segment.watched, segment.device_times):
                if awaited is not None:
                    awaited.wait()

    def close(self) -> None:
        """Take nothing in any more; what is on a device still is given up."""
        self.logged.closed = True
        for segment in self._segments:
            if segment.device_times is not None:
                segment.device_times.result()  # what it holds goes back

    @property
    def detailed(self) -> bool:
        """Whether it has its calls."""
        return any(segment.detailed for segment in self._segments)

    def span_estimate(self) -> int:
        """Count the spans that the record would make, to weigh it before it is built."""
        if self.kind == "data":
            return 1  # it is the fetch
        first = self._segments[0]
        spans = 1 + (self.kind == "step" and first.step_start_ns < first.start_ns)
        for segment in self._segments:
            spans += len(segment.phases) + len(segment.calls) + len(segment.stamps) // 2
        return spans

    def record(self) -> StepRecord:
        """Put the record together, with what has come."""
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
    """What was logged when its step had been handed over.

    Args:
        log: Without its values.
        logged: These.
    """

    __slots__ = ("_log", "logged")

    kind = "log"
    detailed = False

    def __init__(self, log: Log, logged: Logged) -> None:
        self._log, self.logged = log, logged

    def ready(self) -> bool:
        """Tell whether all of it can be read."""
        return self.logged.ready()

    def wait(self) -> None:
        """Wait until it can."""
        self.logged.wait()

    def close(self) -> None:
        """Take nothing in any more."""
        self.logged.closed = True

    def span_estimate(self) -> int:
        """Return 0: it makes no span."""
        return 0

    def record(self) -> Log:
        """Put the record together, with what has come."""
        return self._log._replace(values=self.logged.values())


class PendingRecords:
    """The records of one thread, in order; at most two steps wait for their numbers."""

    def __init__(self) -> None:
        self._pending: deque[PendingRecord | PendingLog] = deque()

    def add(self, pending: PendingRecord | PendingLog) -> None:
        """Hold a record."""
        self._pending.append(pending)

    def last_step(self) -> Logged | None:
        """Return what the last step has logged, where it is here still."""
        for pending in reversed(self._pending):
            if pending.kind == "step":
                return pending.logged
        return None

    def release(self, hand_over: HandOver) -> None:
        """Hand over in order what is ready, and the oldest where too many wait."""
        while self._pending:
            waiting = list(self._pending)  # a signal's handler may flush in the midst of it
            if not waiting or not (waiting[0].ready() or len(waiting) > MAX_WAITING):
                return
            self._hand_over_first(hand_over, wait=False)

    def release_all(self, hand_over: HandOver) -> None:
        """Wait for what is to come and hand over everything."""
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
