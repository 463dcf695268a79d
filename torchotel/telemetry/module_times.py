"""Time and number of module calls: what a detailed step has hundreds of."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from torchotel._records import ModuleInfo
from torchotel._utils.gil import Sliced
from torchotel.telemetry import instruments as table
from torchotel.telemetry.accumulators import Accumulators, Labels, label

if TYPE_CHECKING:
    from torchotel.tracing.call_tree import Timed

MOST_MODULES = 2048  # each has a forward and a backward


@dataclass(slots=True, eq=False)
class _Sum:
    time_ns: int = 0
    calls: int = 0
    device_ns: int | None = None
    """None where no call was timed on a device."""


_Sums: TypeAlias = dict[ModuleInfo, _Sum]

_logger = logging.getLogger("torchotel")


class ModuleLabels(dict[ModuleInfo, tuple[Labels, Labels]]):
    """Give a module's labels, of its forward and of its backward."""

    def __missing__(self, module: ModuleInfo) -> tuple[Labels, Labels]:
        if len(self) >= MOST_MODULES:  # models that come and go
            self.clear()
        shared = label(module.model), label(module.path), label(module.type)
        found = self[module] = (*shared, "forward"), (*shared, "backward")
        return found


class ModuleTimes:
    """Add calls up by module, and by labels only when somebody reads: four strings are a costly key.

    Whoever shares them between threads holds a lock.

    Args:
        labels: Those of modules.
        sliced: Works through calls.
    """

    def __init__(self, labels: ModuleLabels, sliced: Sliced) -> None:
        self._labels, self._sliced = labels, sliced
        self._sums: tuple[_Sums, _Sums] = {}, {}
        """Since the last reading, forward and backward."""
        self._full = False

    def add(self, timed: Timed, numbers: Accumulators) -> None:
        """Take the calls of a step; `numbers` get what there is of modules that come and go."""
        forward, backward = self._sums
        calls, hidden, sliced = timed.calls, timed.hidden, self._sliced
        for index in sliced(range(timed.own, len(calls))):
            if not hidden[index]:
                call = calls[index]
                _add(forward, call.site.module, call.end_ns - call.start_ns, timed.device_ns.get(index))
        for run in sliced(timed.runs):
            if not hidden[run.call]:
                _add(backward, calls[run.call].site.module, run.end_ns - run.start_ns, run.device_ns)
        if len(forward) + len(backward) > 2 * MOST_MODULES:
            self.settle(numbers)

    def settle(self, numbers: Accumulators) -> None:
        """Bring what was added into the counters; beyond `MOST_MODULES` no further module is begun."""
        times, calls = numbers.of(table.MODULE_TIME), numbers.of(table.MODULE_CALLS)
        device_times = numbers.of(table.MODULE_DEVICE_TIME)
        for direction, sums in enumerate(self._sums):
            taken = sums.copy()
            sums.clear()  # first: a handler may read in the midst of it
            for module, total in self._sliced(taken.items()):
                labels = self._labels[module][direction]
                if labels not in times and len(times) >= 2 * MOST_MODULES:
                    self._tell_full()
                    continue
                times[labels] = times.get(labels, 0.0) + total.time_ns / 1e9
                calls[labels] = calls.get(labels, 0.0) + total.calls
                if total.device_ns is not None:
                    device_times[labels] = device_times.get(labels, 0.0) + total.device_ns / 1e9

    def _tell_full(self) -> None:
        if not self._full:
            self._full = True
            _logger.warning("Metrics of more than %d modules are left out; spans and totals are not", MOST_MODULES)


def _add(sums: _Sums, module: ModuleInfo, duration_ns: int, device_ns: int | None) -> None:
    total = sums.get(module)
    if total is None:
        total = sums[module] = _Sum()
    total.time_ns += duration_ns
    total.calls += 1
    if device_ns is not None:
        total.device_ns = (total.device_ns or 0) + device_ns
