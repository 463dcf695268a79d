"""Finished steps, held while their numbers are on their way or a last word may come, and handed over in their parts."""

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
    """The parts of a step, an evaluation or a fetch, until whoever takes it over puts its record together.

    That is the worker, which does many at a time: amid a training each function that runs is one more to be fetched.

    Args:
        kind: "step", "evaluation" or "data".
        number: How many of the kind there were before.
        parts: In order.
        thread: The id of the one that ran them.
        reason: Why it has its detail.
        memory: That of devices at its end.
    """

    __slots__ = (
        "_identity", "_memory", "_number", "_parts", "_reason", "_thread", "_unix_offset_ns", "kind", "logged",
    )  # fmt: skip

    def __init__(
        self,
        kind: str,
        number: int,
        parts: Sequence[StepSegment],
        thread: int,
        reason: str | None = None,
        memory: Sequence[DeviceMemory] = (),
    ) -> None:
        self.kind, self._number, self._parts, self._thread = kind, number, parts, thread
        self._reason, self._memory = reason, memory
        first = parts[0]
        self.logged, rate, identity = first.logged, first.learning_rate, first.identity
        if len(parts) > 1:
            identity = next((part.identity for part in parts if part.identity.reference is not None), identity)
            for part in parts[1:]:
                rate = rate if part.learning_rate is None else part.learning_rate
                self.logged.merge(part.logged)
        self._unix_offset_ns = identity.unix_offset_ns or unix_offset_ns()
        self._identity = identity.take()
        if rate is not None:
            self.logged.learning_rate(rate)

    def ready(self) -> bool:
        """Tell whether all of it can be read, and that of an evaluation which it must not wait for."""
        for part in self._parts:
            if part.gradients and not all(norms.ready() for norms in part.gradients.values()):
                return False
            if part.device_times is not None and not part.device_times.ready() and self.kind == "step":
                return False  # the trace of a request does not wait for the next request
            if part.watched and not all(gradient.ready() for gradient in part.watched):
                return False
        return self.logged.ready()

    def wait(self) -> None:
        """Wait until it can."""
        self.logged.wait()
        for part in self._parts:
            for awaited in (*part.gradients.values(), *part.watched, part.device_times):
                if awaited is not None:
                    awaited.wait()

    def close(self) -> None:
        """Take nothing in any more; what is on a device still is given up."""
        self.logged.closed = True
        for part in self._parts:
            if part.device_times is not None:
                part.device_times.result()  # what it holds goes back

    @property
    def detailed(self) -> bool:
        """Whether it has its calls."""
        return any(part.detailed for part in self._parts)

    def span_estimate(self) -> int:
        """Count the spans that the record would make, to weigh it before it is built."""
        if self.kind == "data":
            return 1  # it is the fetch
        first = self._parts[0]
        spans = 1 + (self.kind == "step" and first.step_start_ns < first.start_ns)
        for part in self._parts:
            spans += len(part.phases) + len(part.calls) + len(part.stamps) // 2
        return spans

    def record(self) -> StepRecord:
        """Put the record together, with what has come."""
        parts = self._parts
        unit = build_record(self.kind, self._number, parts, self._thread, self._identity, self._unix_offset_ns)
        unit.reason, unit.memory = self._reason, self._memory
        unit.values = self.logged.values()
        unit.gradients = step_norms([part.gradients for part in parts])
        unit.tensor_gradients = [gradient.result() for part in parts for gradient in part.watched]
        times = [part.device_times.result() for part in parts if part.device_times is not None]
        unit.device_times = [one for one in times if one is not None]
        return unit


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
        self._held: deque[PendingRecord | PendingLog] = deque()

    def add(self, held: PendingRecord | PendingLog) -> None:
        """Hold a record."""
        self._held.append(held)

    def last_step(self) -> Logged | None:
        """Return what the last step has logged, where it is here still."""
        for held in reversed(self._held):
            if held.kind == "step":
                return held.logged
        return None

    def release(self, hand_over: HandOver) -> None:
        """Hand over in order what is ready, and the oldest where too many wait."""
        while self._held:
            waiting = list(self._held)  # a signal's handler may flush in the midst of it
            if not waiting or not (waiting[0].ready() or len(waiting) > MAX_WAITING):
                return
            self._hand_over_first(hand_over, wait=False)

    def release_all(self, hand_over: HandOver) -> None:
        """Wait for what is to come and hand over everything."""
        while self._held:
            self._hand_over_first(hand_over, wait=True)

    def _hand_over_first(self, hand_over: HandOver, *, wait: bool) -> None:
        try:
            held = self._held.popleft()
        except IndexError:
            return
        if wait:
            held.wait()
        held.close()
        hand_over(held)
