"""Count steps, evaluations, module calls and logged values; every exporter reads from here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from torchotel._limits import MAX_METRIC_MODULES
from torchotel._records import PHASES, Log, LogValue, ModuleInfo, SpanReference, StepRecord, phase_times_s
from torchotel._semconv import LOGGED_NAMES
from torchotel._utils.faults import Warn
from torchotel._utils.gil import GilYielder
from torchotel.metrics import instruments as table
from torchotel.metrics.aggregation import (
    NO_LABELS,
    Aggregations,
    Exemplar,
    Exemplars,
    HistogramDataPoint,
    Labels,
    MetricData,
    NumberDataPoint,
    label,
)
from torchotel.metrics.instruments import Instrument

if TYPE_CHECKING:
    from torchotel.tracing.call_tree import Timed


@dataclass(slots=True, eq=False)
class _Sum:
    time_ns: int = 0
    calls: int = 0
    device_ns: int | None = None
    """None where no call was timed on a device."""


_Sums: TypeAlias = dict[ModuleInfo, _Sum]


class ModuleLabels(dict[ModuleInfo, tuple[Labels, Labels]]):
    """Give a module's labels, of its forward and of its backward."""

    def __missing__(self, module: ModuleInfo) -> tuple[Labels, Labels]:
        if len(self) >= MAX_METRIC_MODULES:  # models that come and go
            self.clear()
        shared = label(module.model), label(module.path), label(module.type)
        found = self[module] = (*shared, "forward"), (*shared, "backward")
        return found


class ModuleTimes:
    """Add calls up by module, and by labels only when somebody reads: four strings are a costly key.

    Whoever shares them between threads holds a lock.

    Args:
        labels: Those of modules.
        yielder: Counts calls, to yield the GIL.
    """

    def __init__(self, labels: ModuleLabels, yielder: GilYielder) -> None:
        self._labels, self._yielder = labels, yielder
        self._sums: tuple[_Sums, _Sums] = {}, {}
        """Since the last reading, forward and backward."""
        self._warn = Warn()

    def add(self, timed: Timed, numbers: Aggregations) -> None:
        """Take the calls of a step; `numbers` get what there is of modules that come and go."""
        forward, backward = self._sums
        calls, hidden, yielder = timed.calls, timed.hidden, self._yielder
        for index in yielder(range(timed.own, len(calls))):
            if not hidden[index]:
                call = calls[index]
                _add(forward, call.site.module, call.end_ns - call.start_ns, timed.device_ns.get(index))
        for run in yielder(timed.runs):
            if not hidden[run.call]:
                _add(backward, calls[run.call].site.module, run.end_ns - run.start_ns, run.device_ns)
        if len(forward) + len(backward) > 2 * MAX_METRIC_MODULES:
            self.settle(numbers)

    def settle(self, numbers: Aggregations) -> None:
        """Bring what was added into the counters; beyond `MAX_METRIC_MODULES` no further module is begun."""
        times, calls = numbers.of(table.MODULE_TIME), numbers.of(table.MODULE_CALLS)
        device_times = numbers.of(table.MODULE_DEVICE_TIME)
        for direction, sums in enumerate(self._sums):
            taken = sums.copy()
            sums.clear()  # first: a handler may read in the midst of it
            for module, total in self._yielder(taken.items()):
                labels = self._labels[module][direction]
                if labels not in times and len(times) >= 2 * MAX_METRIC_MODULES:
                    self._warn(
                        "Metrics of more than %d modules are left out; spans and totals are not", MAX_METRIC_MODULES
                    )
                    continue
                times[labels] = times.get(labels, 0.0) + total.time_ns / 1e9
                calls[labels] = calls.get(labels, 0.0) + total.calls
                if total.device_ns is not None:
                    device_times[labels] = device_times.get(labels, 0.0) + total.device_ns / 1e9


def _add(sums: _Sums, module: ModuleInfo, duration_ns: int, device_ns: int | None) -> None:
    total = sums.get(module)
    if total is None:
        total = sums[module] = _Sum()
    total.time_ns += duration_ns
    total.calls += 1
    if device_ns is not None:
        total.device_ns = (total.device_ns or 0) + device_ns


OUTCOMES = ("exported", "dropped_queue", "dropped_export", "sampled_out")
ALL_PARAMETERS = "all"
"""The scope of gradient norms."""
_LOSS_KIND, _GRADIENT_KIND = ("loss",), ("gradient",)
_BY_NAME = {instrument.name: instrument for instrument in table.TABLE}
LOGGED = {name: _BY_NAME.get(known.metric or "") for name, known in LOGGED_NAMES.items()}
"""The instrument of each known name of `log()`; None: the name has none."""


class Observation(NamedTuple):
    """One value that a histogram counted."""

    instrument: Instrument
    value: float
    labels: Labels
    span: SpanReference | None
    """The root of the trace that shows it; None: no such trace is sent."""


class Metrics:
    """Count steps, evaluations, module calls and what was logged; any thread may read at any time.

    Args:
        outcomes: Reads how many spans met each of `OUTCOMES`.
        errors: Reads how often exports failed, by type.
        overhead_ratio: Reads what detail costs.
        module_histograms: Whether the durations of module calls are kept as a histogram too.
        exemplars: Whether the histogram of steps has exemplars.
        yielder: Counts calls and norms, to yield the GIL; used by the thread that holds the lock.
    """

    def __init__(
        self,
        outcomes: Callable[[], Mapping[str, int]],
        errors: Callable[[], Mapping[str, int]],
        overhead_ratio: Callable[[], float | None] = lambda: None,
        *,
        module_histograms: bool = False,
        exemplars: bool = True,
        yielder: GilYielder | None = None,
    ) -> None:
        self.start_ns = time.time_ns()
        """The unix time from which on it counts."""
        self._outcomes, self._errors, self._overhead_ratio = outcomes, errors, overhead_ratio
        self._module_histograms, self._yielder = module_histograms, yielder or GilYielder()
        self._lock = threading.RLock()  # a signal's handler may shut down in the midst of it
        self._numbers = Aggregations()
        self._exemplars, self._has_exemplars = Exemplars(), exemplars
        self._labels = ModuleLabels()
        self._module_times = ModuleTimes(self._labels, self._yielder)
        self._steps = self._detailed = 0
        self._bad_loss = -1
        """The last step whose loss was not finite: a later log of the same step counts no second time."""
        self._observers: list[Callable[[Observation], None]] = []
        self._begin()

    def observe_with(self, observer: Callable[[Observation], None]) -> None:
        """Hand every value that a histogram counts from now on to `observer`, on the worker."""
        self._observers.append(observer)

    def add(self, unit: StepRecord, timed: Timed, span: SpanReference | None) -> None:
        """Count a step or an evaluation.

        Args:
            unit: The record.
            timed: Its module calls.
            span: The root of its trace, where that is about to be sent.
        """
        observed: list[Observation] = []
        with self._lock:
            if unit.kind == "step":
                self._add_step(unit, span, observed)
                self._module_times.add(timed, self._numbers)
                if self._module_histograms:
                    self._observe_calls(timed, span, observed)
            elif unit.counts_as_evaluation:
                self._numbers.add(table.EVALUATIONS, unit.folded or 1)
                self._numbers.add(table.EVALUATION_TIME, (unit.folded_ns or unit.end_ns - unit.start_ns) / 1e9)
            self._add_values(unit.values, unit.number)
            self._add_readings(unit)
        for observation in observed:  # without the lock: a reader of theirs may be at our numbers
            for observer in self._observers:
                observer(observation)

    def log(self, record: Log) -> None:
        """Count what was logged when its step had been handed over."""
        with self._lock:
            self._add_values(record.values, record.step)

    def exported(self, traces: Iterable[int]) -> None:
        """Take note of traces that arrived; from any thread."""
        with self._lock:
            self._exemplars.arrive(traces)

    def finish(self) -> None:
        """Take note of a normal end."""
        with self._lock:
            self._numbers.set(table.RUN_FINISHED, 1)

    def points(self, instrument: Instrument) -> Sequence[NumberDataPoint]:
        """Read a counter or a gauge."""
        if instrument is table.SPANS:
            counts = self._outcomes()
            return [NumberDataPoint((outcome,), counts.get(outcome, 0)) for outcome in OUTCOMES]
        if instrument is table.EXPORT_ERRORS:
            return [NumberDataPoint((label(kind),), count) for kind, count in self._errors().items()]
        if instrument is table.OVERHEAD_RATIO:
            ratio = self._overhead_ratio()
            return [] if ratio is None else [NumberDataPoint(NO_LABELS, ratio)]
        with self._lock:
            self._module_times.settle(self._numbers)
            return self._numbers.points(instrument)

    def distributions(self, instrument: Instrument) -> Sequence[HistogramDataPoint]:
        """Read a histogram."""
        with self._lock:
            read = self._numbers.distributions(instrument)
            if instrument is table.STEP_DURATION:
                return [one._replace(exemplars=self._exemplars.read()) for one in read]
            return read

    def collect(self) -> list[MetricData]:
        """Read all that there is, as of one moment but for what exporters count."""
        with self._lock:
            return [MetricData(one, self.points(one), self.distributions(one)) for one in table.TABLE]

    def _begin(self) -> None:
        for instrument in table.TABLE:
            if instrument.kind == "counter" and not instrument.labels:
                self._numbers.add(instrument, 0)
        for phase in PHASES:
            self._numbers.add(table.PHASE_TIME, 0, (phase,))
        for kind in (_LOSS_KIND, _GRADIENT_KIND):
            self._numbers.add(table.STEP_NONFINITE, 0, kind)
        self._numbers.buckets(table.STEP_DURATION)
        self._numbers.set(table.RUN_FINISHED, 0)

    def _add_step(self, unit: StepRecord, span: SpanReference | None, observed: list[Observation]) -> None:
        duration_s = (unit.end_ns - unit.start_ns) / 1e9
        end_s = (unit.end_ns + unit.unix_offset_ns) / 1e9
        self._numbers.add(table.STEPS, 1)
        bucket = self._numbers.observe(table.STEP_DURATION, duration_s)
        observed.append(Observation(table.STEP_DURATION, duration_s, NO_LABELS, span))
        if span is not None and self._has_exemplars:
            self._exemplars.expect(bucket, Exemplar(duration_s, end_s, span.trace_id, span.span_id))
        for phase, time_s in phase_times_s(unit).items():
            self._numbers.add(table.PHASE_TIME, time_s, (phase,))
        if unit.gap_ns:
            self._numbers.add(table.PHASE_TIME, unit.gap_ns / 1e9, ("between",))
        ends = self._numbers.of(table.STEP_LAST_END_TIME)
        ends[NO_LABELS] = max(end_s, ends.get(NO_LABELS, 0.0))  # steps of several threads come in any order
        self._steps += 1
        self._detailed += unit.detailed
        self._numbers.set(table.DETAIL_RATIO, self._detailed / self._steps)

    def _observe_calls(self, timed: Timed, span: SpanReference | None, observed: list[Observation]) -> None:
        own = range(timed.own, len(timed.calls))
        lengths = [(index, 0, timed.calls[index].end_ns - timed.calls[index].start_ns) for index in own]
        lengths += [(run.call, 1, run.end_ns - run.start_ns) for run in timed.runs]
        for index, direction, duration_ns in self._yielder(lengths):
            labels = self._labels[timed.calls[index].site.module][direction]
            room = self._numbers.has_room(table.MODULE_DURATION, labels, 2 * MAX_METRIC_MODULES)
            if room and not timed.hidden[index]:
                self._numbers.observe(table.MODULE_DURATION, duration_ns / 1e9, labels)
                observed.append(Observation(table.MODULE_DURATION, duration_ns / 1e9, labels, span))

    def _add_values(self, values: Mapping[str, LogValue], step: int) -> None:
        for name, value in values.items():
            if isinstance(value, str):
                continue
            number = _number(value)
            instrument = LOGGED.get(name)
            if name not in LOGGED:
                self._numbers.set(table.LOG, number, (label(name),))  # `log` bounds the number of names
            elif instrument is not None:
                (self._numbers.add if instrument.kind == "counter" else self._numbers.set)(instrument, number)
            if name == "loss" and not isfinite(number) and step != self._bad_loss:
                self._bad_loss = step
                self._numbers.add(table.STEP_NONFINITE, 1, _LOSS_KIND)

    def _add_readings(self, unit: StepRecord) -> None:
        """Take gradient norms and memory, which are as they were at the end of the step."""
        if (norms := unit.gradients) is not None:
            self._numbers.set(table.GRADIENT_NORM, norms.total, (ALL_PARAMETERS,))
            finite = isfinite(norms.total)
            for module, norm in self._yielder(norms.modules):
                labels = (*self._labels[module][0][:2], ALL_PARAMETERS)
                self._numbers.set(table.MODULE_GRADIENT_NORM, norm, labels, limit=MAX_METRIC_MODULES)
                finite = finite and isfinite(norm)
            if not finite:
                self._numbers.add(table.STEP_NONFINITE, 1, _GRADIENT_KIND)
        for tensor in unit.tensor_gradients:
            if tensor.norm is not None:
                self._numbers.set(table.TENSOR_GRADIENT_NORM, tensor.norm, (label(tensor.name),))  # so does `watch`
        for memory in unit.memory:
            device = (label(memory.device),)
            self._numbers.set(table.MEMORY_ALLOCATED, memory.allocated, device)
            self._numbers.set(table.MEMORY_RESERVED, memory.reserved, device)
            self._numbers.set(table.MEMORY_PEAK, memory.peak, device)


def _number(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number may be larger than any float
        return inf if value > 0 else -inf
