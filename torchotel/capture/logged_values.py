"""Values that the program or a framework logs, and the learning rate of the optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from torchotel._limits import MAX_LOG_NAMES, MAX_LOG_TEXT
from torchotel._records import LogValue
from torchotel._semconv import LOGGED_COUNTS, LOGGED_GAUGES, LOGGED_NAMES
from torchotel._utils.faults import Guard, Warn
from torchotel._utils.text import shortened
from torchotel.capture.async_readback import AsyncReadback, read_async
from torchotel.capture.torch_internals import without_torch_function

LOSS, EPOCH = "loss", "epoch"
FRACTIONS, COUNTS, NUMBERS = frozenset(LOGGED_GAUGES), frozenset(LOGGED_COUNTS), frozenset(LOGGED_NAMES)


class Logged:
    """The values of one step: the last value of a name is used, and counts are added up.

    A framework's value is used if the user has logged none of that name. A loss that is not finite has precedence over
    later ones, because a program that skips the update for such a batch continues the same step.
    """

    __slots__ = ("_counts", "_last", "_losses", "_offered", "_reads", "closed")

    def __init__(self) -> None:
        self._last: dict[str, LogValue | AsyncReadback] = {}
        self._losses: list[LogValue | AsyncReadback] = []
        """Losses that are not read yet, then the last one; none after a loss that is not finite."""
        self._counts: dict[str, list[LogValue | AsyncReadback]] = {}
        self._offered: Logged | None = None
        self._reads = False
        """Whether some values are read later."""
        self.closed = False
        """Whether the step was handed over: later values are recorded as late."""

    def add(self, values: Mapping[str, LogValue | AsyncReadback]) -> None:
        """Add logged values."""
        for name, value in values.items():
            if isinstance(value, AsyncReadback):
                self._reads = True
            if name == LOSS:
                self._add_losses([value])
                continue
            if name not in COUNTS:
                self._last[name] = value
                continue
            before = self._counts.setdefault(name, [])
            if before and isinstance(before[-1], int | float) and isinstance(value, int | float):
                before[-1] += value
            else:
                before.append(value)

    def offer(self, values: Mapping[str, LogValue | AsyncReadback]) -> None:
        """Add a framework's values, except counts, which may be totals."""
        self._offered, self._reads = self._offered or Logged(), True
        self._offered.add({name: value for name, value in values.items() if name not in COUNTS})

    def learning_rate(self, rate: LogValue | AsyncReadback) -> None:
        """Add the optimizer's learning rate, which is used if none was logged."""
        self._last.setdefault("lr", rate)
        if isinstance(rate, AsyncReadback):
            self._reads = True

    def merge(self, later: Logged) -> None:
        """Add the values of a later segment of the same step."""
        self._last.update(later._last)
        if later._reads:
            self._reads = True
        if later._losses:
            self._add_losses(later._losses)
        for name, values in later._counts.items():
            self._counts.setdefault(name, []).extend(values)
        if later._offered is not None:
            self._offered = self._offered or Logged()
            self._offered.merge(later._offered)

    def loss_is_bad(self) -> bool:
        """Return whether a loss that can be read is NaN or infinite."""
        for loss in self._losses:
            value = _come_loss(loss)
            if value is not None and not isfinite(value):
                return True
        return self._offered is not None and self._offered.loss_is_bad()

    def ready(self) -> bool:
        """Return whether all values can be read."""
        return not self._reads or all(readback.ready() for readback in self._readbacks())

    def wait(self) -> None:
        """Wait until all values can be read."""
        for readback in self._readbacks():
            readback.wait()

    def values(self) -> dict[str, LogValue]:
        """Return the values that are ready; for closed objects."""
        values: dict[str, LogValue] = {} if self._offered is None else self._offered.values()
        if self._losses and (loss := _worst(self._losses)) is not None:
            values[LOSS] = loss
        for name, value in list(self._last.items()):  # another thread may add a value meanwhile
            if (come := _come(name, value)) is not None:
                values[name] = come
        for name, counts in list(self._counts.items()):
            if (total := _sum(name, counts)) is not None:
                values[name] = total
        return values

    def _add_losses(self, values: Sequence[LogValue | AsyncReadback]) -> None:
        for value in values:
            before = _come_loss(self._losses[-1]) if self._losses else None
            if before is not None and not isfinite(before):
                return
            if before is not None:
                self._losses.pop()
            self._losses.append(value)

    def _readbacks(self) -> list[AsyncReadback]:
        values = [*self._last.values(), *self._losses]
        for counts in self._counts.values():
            values += counts
        if self._offered is not None:
            values += self._offered._readbacks()
        return [value for value in values if isinstance(value, AsyncReadback)]


def _come(name: str, value: LogValue | AsyncReadback) -> LogValue | None:
    """Return a value; None if it is not ready or has the wrong type."""
    if not isinstance(value, AsyncReadback):
        return value
    numbers = value.values()
    return _number(name, numbers[0]) if numbers else None


def _sum(name: str, values: Sequence[LogValue | AsyncReadback]) -> float | None:
    come = [number for value in values if isinstance(number := _come(name, value), int | float)]
    return sum(come) if come else None


def _worst(losses: Sequence[LogValue | AsyncReadback]) -> float | None:
    """Return the first loss that is not finite, else the last one."""
    come = [loss for value in losses if (loss := _come_loss(value)) is not None]
    return next((loss for loss in come if not isfinite(loss)), come[-1] if come else None)


def _come_loss(value: LogValue | AsyncReadback) -> float | None:
    come = _come(LOSS, value)
    return come if isinstance(come, float) else None


class LogReader:
    """Check logged values; a value of a wrong type logs a warning once a name."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._offered: set[str] = set()
        self._warn = Warn()

    def read(self, given: Mapping[str, object], *, offered: bool = False) -> dict[str, LogValue | AsyncReadback]:
        """Return the valid ones of the given values.

        Args:
            given: Values by name.
            offered: By a framework: values of a wrong type are left out silently, and names count separately.
        """
        taken = {}
        known = self._offered if offered else self._names
        complain = _say_nothing if offered else self._complain
        for whole, value in given.items():
            name = shortened(str(whole).strip())
            known.add(name)
            if len(known) > MAX_LOG_NAMES:
                known.discard(name)
                whose = " of a framework" if offered else ""
                message = (
                    f"log() takes {MAX_LOG_NAMES} names{whose}; {name!r} and later ones are left out. Use fewer names"
                )
                self._complain(f"another name{whose}", message)
                continue
            read = _read(name, value)
            if read is None:
                complain(name, f"log({name}=…) got {_shown(value)}; takes {_takes(name)}. It is left out")
            else:
                taken[name] = read
        return taken

    def _complain(self, name: str, message: str) -> None:
        self._warn("%s", message, key=name)


def _say_nothing(name: str, message: str) -> None:
    pass


def _read(name: str, value: Any) -> LogValue | AsyncReadback | None:
    if isinstance(value, Tensor):
        with without_torch_function():  # a mode would be called for each property that is read
            return read_async([value]) if value.numel() == 1 and not value.is_complex() else None
    if isinstance(value, str):
        return None if name in NUMBERS else value[:MAX_LOG_TEXT]
    try:
        item: Callable[[], Any] | None = getattr(value, "item", None)  # NumPy scalars and the like
        return _number(name, item() if item is not None and getattr(value, "size", 0) == 1 else value)
    except Exception:  # noqa: BLE001  # an object of the program may raise anything
        return None


def _number(name: str, value: object) -> LogValue | None:
    if not isinstance(value, bool | int | float):
        return None
    if name in FRACTIONS:
        return float(value)
    if name in COUNTS:
        if not isfinite(value) or value < 0:
            return None
        return value if value % 1 else int(value)
    if name == EPOCH:
        return int(value) if isfinite(value) else None
    return value if isinstance(value, bool | float) else int(value)  # a member of an IntEnum


def _takes(name: str) -> str:
    if name in COUNTS:
        return "a number of at least 0, or a tensor with one element"
    text = "" if name in NUMBERS else ", a string"
    return f"a number{text}, or a tensor with one element"


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return repr(value)[:64] if isinstance(value, str | bool | int | float) else f"{type(value).__name__}"


MAX_REST = 100
"""Steps without the leading optimizer, after which another optimizer leads."""


class LeadingOptimizer:
    """The optimizer of a thread whose learning rate is the step's, so that one series never mixes two optimizers.

    The first optimizer that steps leads. Another leads if that one was deleted or did not step for `MAX_REST` steps.
    """

    __slots__ = ("_optimizer", "_step")

    def __init__(self) -> None:
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._step = 0

    def steps(self, optimizer: torch.optim.Optimizer, step: int) -> bool:
        """Note that an optimizer steps in a step; return whether it leads."""
        leading = self._optimizer and self._optimizer()
        if leading is not optimizer:
            if leading is not None and step - self._step <= MAX_REST:
                return False
            self._optimizer = weakref.ref(optimizer)
        self._step = step
        return True


class LearningRates:
    """Read learning rates of optimizers; an error counts as a fault of this part."""

    def __init__(self) -> None:
        self.guard = Guard("learning rates")

    def read(
        self, leading: LeadingOptimizer, optimizer: torch.optim.Optimizer, step: int
    ) -> float | AsyncReadback | None:
        """Return the learning rate of an optimizer's first parameter group, if it leads. Raises nothing."""
        try:
            if self.guard.is_off or not leading.steps(optimizer, step):
                return None
            return learning_rate(optimizer)
        except Exception:  # noqa: BLE001  # the step is recorded without it
            self.guard.fault()
            return None


def learning_rate(optimizer: torch.optim.Optimizer) -> float | AsyncReadback | None:
    """Return the learning rate of an optimizer's first parameter group; None for one that has none."""
    rate = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
    if type(rate) is float:  # the common case
        return rate
    if isinstance(rate, torch.Tensor):
        return read_async([rate]) if rate.numel() == 1 else None
    return float(rate) if isinstance(rate, int | float) else None
