"""Finished steps that are not handed over yet: their numbers are on their way, or a last word may come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torchotel._records import DeviceTimes, GradientNorms, Log, Record, TensorGradient, Unit
from torchotel.capture.logged import Logged
from torchotel.capture.parts import Awaited, Part

MOST_WAITING = 2

HandOver: TypeAlias = Callable[[Record], None]


@dataclass(slots=True)
class Held:
    """A record, and what is still to come of it."""

    record: Record
    logged: Logged
    gradients: Awaited[GradientNorms | None] | None = None
    watched: Sequence[Awaited[TensorGradient]] = ()
    device_times: Sequence[Awaited[DeviceTimes | None]] = ()

    def ready(self) -> bool:
        """Tell whether all of it can be read, and that of an evaluation which it must not wait for."""
        for times in self.device_times:
            if not times.ready() and not (isinstance(self.record, Unit) and self.record.kind != "step"):
                return False  # the trace of a request does not wait for the next request
        if not self.logged.ready() or not (self.gradients is None or self.gradients.ready()):
            return False
        return not self.watched or all(gradient.ready() for gradient in self.watched)

    def wait(self) -> None:
        """Wait until it can."""
        self.logged.wait()
        if self.gradients is not None:
            self.gradients.wait()
        for awaited in (*self.watched, *self.device_times):
            awaited.wait()

    def finish(self) -> Record:
        """Return the record with what has come."""
        record = self.record
        if isinstance(record, Log):
            return record._replace(values=self.logged.close())
        record.values = self.logged.close()
        if self.gradients is not None:
            record.gradients = self.gradients.result()
        if self.watched:
            record.tensor_gradients = [gradient.result() for gradient in self.watched]
        if self.device_times:
            record.device_times = [times for one in self.device_times if (times := one.result()) is not None]
        return record


def hold(unit: Unit, parts: Sequence[Part]) -> Held:
    """Gather what is to come of a step's parts; the last backward's norms are the step's."""
    first, *later = parts
    held = Held(unit, first.logged, first.gradients, first.watched)
    held.device_times = [part.device_times for part in parts if part.device_times is not None]
    rate = first.learning_rate
    for part in later:
        rate = rate if part.learning_rate is None else part.learning_rate
        held.logged.merge(part.logged)
        held.gradients = held.gradients if part.gradients is None else part.gradients
    if later:
        held.watched = [watched for part in parts for watched in part.watched]
    if rate is not None:
        held.logged.learning_rate(rate)
    return held


class HeldSteps:
    """The records of one thread, in order; at most two steps wait for their numbers."""

    def __init__(self) -> None:
        self._held: deque[Held] = deque()

    def add(self, held: Held) -> None:
        """Hold a record."""
        self._held.append(held)

    def last_step(self) -> Logged | None:
        """Return what the last step has logged, where it is here still."""
        for held in reversed(self._held):
            if isinstance(held.record, Unit) and held.record.kind == "step":
                return held.logged
        return None

    def release(self, hand_over: HandOver) -> None:
        """Hand over in order what is ready, and the oldest where too many wait."""
        while (held := self._take_ready()) is not None:
            hand_over(held.finish())

    def release_all(self, hand_over: HandOver) -> None:
        """Wait for what is to come and hand over everything."""
        while (held := self._take()) is not None:
            held.wait()
            hand_over(held.finish())

    def _take_ready(self) -> Held | None:
        waiting = list(self._held)  # a signal's handler may flush in the midst of it
        if waiting and (waiting[0].ready() or len(waiting) > MOST_WAITING):
            return self._take()
        return None

    def _take(self) -> Held | None:
        try:
            return self._held.popleft()
        except IndexError:
            return None
