"""Finished steps that are not handed over yet: their numbers are on their way, or a last word may come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
    watched: Sequence[Awaited[TensorGradient]] = field(default_factory=list)
    device_times: Sequence[Awaited[DeviceTimes | None]] = field(default_factory=list)

    def ready(self) -> bool:
        """Tell whether all of it can be read, and that of an evaluation which it must not wait for."""
        timed = all(times.ready() for times in self.device_times)
        if isinstance(self.record, Unit) and self.record.kind != "step":
            timed = True  # the trace of a request does not wait for the next request
        return timed and self.logged.ready() and all(awaited.ready() for awaited in self._awaited())

    def wait(self) -> None:
        """Wait until it can."""
        self.logged.wait()
        for awaited in (*self._awaited(), *self.device_times):
            awaited.wait()

    def finish(self) -> Record:
        """Return the record with what has come."""
        record = self.record
        if isinstance(record, Log):
            return record._replace(values=self.logged.close())
        record.values = self.logged.close()
        record.gradients = self.gradients.result() if self.gradients is not None else None
        record.tensor_gradients = [gradient.result() for gradient in self.watched]
        record.device_times = [times for one in self.device_times if (times := one.result()) is not None]
        return record

    def _awaited(self) -> list[Awaited[object]]:
        return [*self.watched] if self.gradients is None else [self.gradients, *self.watched]


def hold(unit: Unit, parts: Sequence[Part]) -> Held:
    """Gather what is to come of a step's parts; the last backward's norms are the step's."""
    logged = Logged()
    for part in parts:  # the optimizers' first: what is logged beats them
        if part.learning_rate is not None:
            logged.add({"lr": part.learning_rate})
    for part in parts:
        logged.merge(part.logged)
    gradients = [part.gradients for part in parts if part.gradients is not None]
    watched = [gradient for part in parts for gradient in part.watched]
    times = [part.device_times for part in parts if part.device_times is not None]
    return Held(unit, logged, gradients[-1] if gradients else None, watched, times)


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
