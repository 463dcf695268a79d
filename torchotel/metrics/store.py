"""Aggregate steps, evaluations, module calls and logged values for all metric exporters."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from torchotel._collectives import GroupReading
from torchotel._limits import MAX_METRIC_MODULES
from torchotel._records import PHASES, Log, LogValue, ModuleInfo, SpanReference, StepRecord, phase_times_s, waits_ns
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
    from torchotel.tracing.call_tree import CallTree


@dataclass(slots=True, eq=False)
class _Sum:
    time_ns: int = 0
    calls: int = 0
    device_ns: int | None = None
    """None: no call was timed on a device."""


_Sums: TypeAlias = dict[ModuleInfo, _Sum]


class ModuleLabels(dict[ModuleInfo, tuple[Labels, Labels]]):
    """Map a module to the labels of its forward and of its backward."""

    def __missing__(self, module: ModuleInfo) -> tuple[Labels, Labels]:
        if len(self) >= MAX_METRIC_MODULES:  # the program creates ever new models
            self.clear()
        shared = label(module.model), label(module.path), label(module.type)
        found = self[module] = (*shared, "forward"), (*shared, "backward")
        return found


class ModuleTimes:
    """Sum calls by module, and by labels only when they are read: a key of four strings is slow.

    Threads that share an object hold a lock.

    Args:
        labels: Labels of modules.
        yielder: Counts calls, to yield the GIL.
    """

    def __init__(self, labels: ModuleLabels, yielder: GilYielder) -> None:
        self._labels, self._yielder = labels, yielder
        self._sums: tuple[_Sums, _Sums] = {}, {}
        """Forward and backward sums since they were last folded into the counters."""
        self._warn = Warn()

    def add(self, tree: CallTree, aggregations: Aggregations) -> None:
        """Add the calls of a step; fold all sums into `aggregations` if there are too many modules."""
        forward_sums, backward_sums = self._sums
        calls, hidden, yielder = tree.calls, tree.hidden, self._yielder
        for index in yielder(range(tree.first_own, len(calls))):
            if not hidden[index]:
                call = calls[index]
                _add(forward_sums, call.signature.module, call.end_ns - call.start_ns, tree.device_ns.get(index))
        for backward in yielder(tree.backwards):
            if not hidden[backward.call]:
                module, duration_ns = calls[backward.call].signature.module, backward.end_ns - backward.start_ns
                _add(backward_sums, module, duration_ns, backward.device_ns)
        if len(forward_sums) + len(backward_sums) > 2 * MAX_METRIC_MODULES:
            self.fold_into_counters(aggregations)

    def fold_into_counters(self, aggregations: Aggregations) -> None:
        """Add the sums to the counters; beyond `MAX_METRIC_MODULES` modules, further ones are left out."""
        times, calls = aggregations.of(table.MODULE_TIME), aggregations.of(table.MODULE_CALLS)
        device_times = aggregations.of(table.MODULE_DEVICE_TIME)
        for direction, sums in enumerate(self._sums):
            pending = sums.copy()
            sums.clear()  # before the loop: a signal handler may read meanwhile
            for module, total in self._yielder(pending.items()):
                labels = self._labels[module][direction]
                if labels not in times and len(times) >= 2 * MAX_METRIC_MODULES:
                    self._warn(
                        "Metrics of more than %d modules are left out; spans are not",
                        MAX_METRIC_MODULES,
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
ALL_PARAMETERS, SHARD = "all", "shard"
"""Values of `torch.gradient.scope`."""
_LOSS_KIND, _GRADIENT_KIND = ("loss",), ("gradient",)
_BY_NAME = {instrument.name: instrument for instrument in table.TABLE}
LOGGED = {name: _BY_NAME.get(known.metric or "") for name, known in LOGGED_NAMES.items()}
"""The instrument of each known name of `log()`; None: the name has none."""


class Observation(NamedTuple):
    """One value that was added to a histogram."""

    instrument: Instrument
    value: float
    labels: Labels
    span: SpanReference | None
    """Root of the trace of the value; None: the trace is not exported."""


class Metrics:
    """Aggregate records; any thread may read at any time.

    Args:
        outcomes: Returns the number of spans of each of `OUTCOMES`.
        errors: Returns the number of failed exports by type.
        overhead_ratio: Returns the share of step time that detail costs.
        module_histograms: Whether durations of module calls are a histogram, too.
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
        """Unix time at which all counters were 0."""
        self._outcomes, self._errors, self._overhead_ratio = outcomes, errors, overhead_ratio
        self._module_histograms, self._yielder = module_histograms, yielder or GilYielder()
        self._lock = threading.RLock()  # reentrant: a signal handler may shut down while this thread holds it
        self._aggregations = Aggregations()
        self._exemplars, self._has_exemplars = Exemplars(), exemplars
        self._labels = ModuleLabels()
        self._module_times = ModuleTimes(self._labels, self._yielder)
        self._steps = self._detailed = 0
        self._bad_loss = -1
        """The last step with a NaN or infinite loss: a later log of this step is not counted again."""
        self._observers: list[Callable[[Observation], None]] = []
        self._begin()

    def observe_with(self, observer: Callable[[Observation], None]) -> None:
        """Call `observer` on the worker thread with every later value of a histogram."""
        self._observers.append(observer)

    def add(self, record: StepRecord, tree: CallTree, span: SpanReference | None) -> None:
        """Add a step or an evaluation.

        Args:
            record: The step or the evaluation.
            tree: The module calls of the record.
            span: Root of the record's trace if the trace is about to be exported.
        """
        observed: list[Observation] = []
        with self._lock:
            if record.kind != "stall":
                self._remove_collectives()
            if record.kind == "step":
                self._add_step(record, span, observed)
                self._module_times.add(tree, self._aggregations)
                if self._module_histograms:
                    self._observe_calls(tree, span, observed)
            elif record.counts_as_evaluation:
                self._aggregations.add(table.EVALUATIONS, record.folded or 1)
                self._aggregations.add(
                    table.EVALUATION_TIME, (record.folded_ns or record.end_ns - record.start_ns) / 1e9
                )
            self._add_collectives(record)
            self._add_values(record.values, record.number)
            self._add_norms_and_memory(record)
        for observation in observed:  # without the lock: an observer's reader may read these metrics
            for observer in self._observers:
                observer(observation)

    def log(self, record: Log) -> None:
        """Add values that were logged after their step was recorded."""
        with self._lock:
            self._add_values(record.values, record.step)

    def exported(self, traces: Iterable[int]) -> None:
        """Make exemplars of exported traces; from any thread."""
        with self._lock:
            self._exemplars.arrive(traces)

    def finish(self) -> None:
        """Record the normal end of the run."""
        with self._lock:
            self._aggregations.set(table.RUN_FINISHED, 1)

    def set_stalled(self, *, stalled: bool) -> None:
        """Record whether the training stalls."""
        with self._lock:
            self._aggregations.set(table.RUN_STALLED, int(stalled))

    def set_collectives(self, groups: Sequence[GroupReading]) -> None:
        """Set the numbers of collectives of each process group; the next step or evaluation removes them."""
        with self._lock:
            self._remove_collectives()
            descriptions = Counter(group.description for group in groups)
            for group in groups:
                labels = (label(group.description if descriptions[group.description] == 1 else group.name),)
                self._aggregations.set(table.COLLECTIVE_ENQUEUED, group.enqueued, labels)
                self._aggregations.set(table.COLLECTIVE_COMPLETED, group.completed, labels)

    def points(self, instrument: Instrument) -> Sequence[NumberDataPoint]:
        """Return the values of a counter or a gauge."""
        if instrument is table.SPANS:
            counts = self._outcomes()
            return [NumberDataPoint((outcome,), counts.get(outcome, 0)) for outcome in OUTCOMES]
        if instrument is table.EXPORT_ERRORS:
            return [NumberDataPoint((label(kind),), count) for kind, count in self._errors().items()]
        if instrument is table.OVERHEAD_RATIO:
            ratio = self._overhead_ratio()
            return [] if ratio is None else [NumberDataPoint(NO_LABELS, ratio)]
        with self._lock:
            self._module_times.fold_into_counters(self._aggregations)
            return self._aggregations.points(instrument)

    def histograms(self, instrument: Instrument) -> Sequence[HistogramDataPoint]:
        """Return the series of a histogram."""
        with self._lock:
            read = self._aggregations.histograms(instrument)
            if instrument is table.STEP_DURATION:
                return [one._replace(exemplars=self._exemplars.read()) for one in read]
            return read

    def collect(self) -> list[MetricData]:
        """Return all metrics at one moment; counts of exporters may be newer."""
        with self._lock:
            return [MetricData(one, self.points(one), self.histograms(one)) for one in table.TABLE]

    def _begin(self) -> None:
        for instrument in table.TABLE:
            if instrument.kind == "counter" and not instrument.labels:
                self._aggregations.add(instrument, 0)
        for phase in PHASES:
            self._aggregations.add(table.PHASE_TIME, 0, (phase,))
        for kind in (_LOSS_KIND, _GRADIENT_KIND):
            self._aggregations.add(table.STEP_NONFINITE, 0, kind)
        self._aggregations.buckets(table.STEP_DURATION)
        self._aggregations.set(table.RUN_FINISHED, 0)

    def _remove_collectives(self) -> None:
        for instrument in (table.COLLECTIVE_ENQUEUED, table.COLLECTIVE_COMPLETED):
            self._aggregations.of(instrument).clear()

    def _add_step(self, record: StepRecord, span: SpanReference | None, observed: list[Observation]) -> None:
        duration_s = (record.end_ns - record.start_ns) / 1e9
        end_s = (record.end_ns + record.unix_offset_ns) / 1e9
        self._aggregations.add(table.STEPS, 1)
        bucket = self._aggregations.observe(table.STEP_DURATION, duration_s)
        observed.append(Observation(table.STEP_DURATION, duration_s, NO_LABELS, span))
        if span is not None and self._has_exemplars:
            self._exemplars.expect(bucket, Exemplar(duration_s, end_s, span.trace_id, span.span_id))
        for phase, time_s in phase_times_s(record).items():
            self._aggregations.add(table.PHASE_TIME, time_s, (phase,))
        if record.gap_ns:
            self._aggregations.add(table.PHASE_TIME, record.gap_ns / 1e9, ("between",))
        ends = self._aggregations.of(table.STEP_LAST_END_TIME)
        ends[NO_LABELS] = max(end_s, ends.get(NO_LABELS, 0.0))  # steps of several threads arrive in any order
        self._steps += 1
        self._detailed += record.detailed
        self._aggregations.set(table.DETAIL_RATIO, self._detailed / self._steps)

    def _observe_calls(self, tree: CallTree, span: SpanReference | None, observed: list[Observation]) -> None:
        own = range(tree.first_own, len(tree.calls))
        lengths = [(index, 0, tree.calls[index].end_ns - tree.calls[index].start_ns) for index in own]
        lengths += [(backward.call, 1, backward.end_ns - backward.start_ns) for backward in tree.backwards]
        for index, direction, duration_ns in self._yielder(lengths):
            labels = self._labels[tree.calls[index].signature.module][direction]
            room = self._aggregations.has_room(table.MODULE_DURATION, labels, 2 * MAX_METRIC_MODULES)
            if room and not tree.hidden[index]:
                self._aggregations.observe(table.MODULE_DURATION, duration_ns / 1e9, labels)
                observed.append(Observation(table.MODULE_DURATION, duration_ns / 1e9, labels, span))

    def _add_collectives(self, record: StepRecord) -> None:
        add = self._aggregations.add
        for one, wait_ns in zip(record.collectives, waits_ns(record.collectives), strict=True):
            labels = one.operation, label(one.group)
            add(table.COLLECTIVE_CALLS, 1, labels)
            add(table.COLLECTIVE_BYTES, one.size_bytes, labels)
            add(table.COLLECTIVE_TIME, (one.end_ns - one.start_ns) / 1e9, labels)
            add(table.COLLECTIVE_WAIT, wait_ns / 1e9, labels)

    def _add_values(self, values: Mapping[str, LogValue], step: int) -> None:
        for name, value in values.items():
            if isinstance(value, str):
                continue
            number = _number(value)
            instrument = LOGGED.get(name)
            if name not in LOGGED:
                self._aggregations.set(table.LOG, number, (label(name),))  # `log` bounds the number of names
            elif instrument is not None:
                (self._aggregations.add if instrument.kind == "counter" else self._aggregations.set)(instrument, number)
            if name == "loss" and not isfinite(number) and step != self._bad_loss:
                self._bad_loss = step
                self._aggregations.add(table.STEP_NONFINITE, 1, _LOSS_KIND)

    def _add_norms_and_memory(self, record: StepRecord) -> None:
        """Set gradient norms and memory, which were read at the end of the step."""
        if (norms := record.gradients) is not None:
            scope = SHARD if norms.sharded else ALL_PARAMETERS
            self._aggregations.of(table.GRADIENT_NORM).clear()  # the scope may change if the program shards its model
            self._aggregations.set(table.GRADIENT_NORM, norms.total, (scope,))
            finite = isfinite(norms.total)
            for module, norm in self._yielder(norms.modules):
                labels = (*self._labels[module][0][:2], scope)
                self._aggregations.set(table.MODULE_GRADIENT_NORM, norm, labels, limit=MAX_METRIC_MODULES)
                finite = finite and isfinite(norm)
            if not finite:
                self._aggregations.add(table.STEP_NONFINITE, 1, _GRADIENT_KIND)
        for tensor in record.tensor_gradients:  # `watch` bounds the number of names
            if tensor.norm is not None:
                self._aggregations.set(table.TENSOR_GRADIENT_NORM, tensor.norm, (label(tensor.name),))
        for memory in record.memory:
            device = (label(memory.device),)
            self._aggregations.set(table.MEMORY_ALLOCATED, memory.allocated, device)
            self._aggregations.set(table.MEMORY_RESERVED, memory.reserved, device)
            self._aggregations.set(table.MEMORY_PEAK, memory.peak, device)


def _number(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an int may be larger than any float
        return inf if value > 0 else -inf
