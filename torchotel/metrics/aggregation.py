"""Counters, gauges and histograms with their exemplars."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import NamedTuple, TypeAlias

from torchotel._limits import MAX_LABEL
from torchotel.metrics.instruments import Instrument

MAX_PENDING = 4096  # steps that wait for their trace; those of dropped traces never come


class Exemplar(NamedTuple):
    """One observation, and the span that it was of."""

    value: float
    unix_s: float
    trace_id: int
    span_id: int


class Exemplars:
    """Keep the last step of each bucket whose trace arrived; one that was dropped would lead nowhere."""

    def __init__(self) -> None:
        # A plain dictionary takes ever longer to find the first of its entries, once those before it are gone.
        self._pending: OrderedDict[int, tuple[int, Exemplar]] = OrderedDict()
        self._arrived: dict[int, Exemplar] = {}

    def expect(self, bucket: int, exemplar: Exemplar) -> None:
        """Take note of a step whose trace is about to be sent."""
        if len(self._pending) >= MAX_PENDING:
            self._pending.popitem(last=False)
        self._pending[exemplar.trace_id] = bucket, exemplar

    def arrive(self, traces: Iterable[int]) -> None:
        """Take note of traces that reached their destination."""
        for trace_id in traces:
            found = self._pending.pop(trace_id, None)
            if found is not None:
                bucket, exemplar = found
                self._arrived[bucket] = exemplar

    def read(self) -> dict[int, Exemplar]:
        """Return one for each bucket that has one."""
        return dict(self._arrived)


Labels: TypeAlias = tuple[str, ...]
"""Values of an instrument's labels, in their order."""

NO_LABELS: Labels = ()


class NumberDataPoint(NamedTuple):
    """The value of a counter or a gauge."""

    labels: Labels
    value: float


class HistogramDataPoint(NamedTuple):
    """The state of a histogram."""

    labels: Labels
    counts: Sequence[int]
    """Observations in each bucket, not in those below it; one bucket more than there are bounds."""
    sum: float
    exemplars: Mapping[int, Exemplar]
    """By bucket."""


class MetricData(NamedTuple):
    """All that is known of one instrument at one moment; a histogram has distributions, all others points."""

    instrument: Instrument
    points: Sequence[NumberDataPoint] = ()
    distributions: Sequence[HistogramDataPoint] = ()


@dataclass(slots=True, eq=False)
class _Buckets:
    counts: list[int]
    sum: float = 0.0


@dataclass(slots=True, eq=False)
class Aggregations:
    """Counters, gauges and histograms; whoever shares them between threads holds a lock."""

    _values: dict[Instrument, dict[Labels, float]] = field(default_factory=dict)
    _buckets: dict[Instrument, dict[Labels, _Buckets]] = field(default_factory=dict)

    def of(self, instrument: Instrument) -> dict[Labels, float]:
        """Return the values of a counter or a gauge, to be changed in place."""
        return self._values.setdefault(instrument, {})

    def add(self, instrument: Instrument, amount: float, labels: Labels = NO_LABELS) -> None:
        """Add to a counter; what would make it smaller, or no number, is left out."""
        if amount >= 0 and isfinite(amount):
            values = self.of(instrument)
            values[labels] = values.get(labels, 0.0) + amount

    def set(
        self, instrument: Instrument, value: float, labels: Labels = NO_LABELS, *, limit: int | None = None
    ) -> None:
        """Set a gauge; beyond `limit` series no further one is begun."""
        values = self.of(instrument)
        if limit is None or labels in values or len(values) < limit:
            values[labels] = value

    def observe(self, instrument: Instrument, value: float, labels: Labels = NO_LABELS) -> int:
        """Count into a histogram and return the bucket."""
        buckets = self.buckets(instrument, labels)
        bucket = bisect_left(instrument.bounds, value)
        buckets.counts[bucket] += 1
        buckets.sum += value
        return bucket

    def has_room(self, histogram: Instrument, labels: Labels, limit: int) -> bool:
        """Tell whether a series is there already, or fewer than `limit` are."""
        series = self._buckets.get(histogram, {})
        return labels in series or len(series) < limit

    def buckets(self, instrument: Instrument, labels: Labels = NO_LABELS) -> _Buckets:
        """Return a histogram's series, which begins empty."""
        series = self._buckets.setdefault(instrument, {})
        found = series.get(labels)
        if found is None:
            found = series[labels] = _Buckets([0] * (len(instrument.bounds) + 1))
        return found

    def points(self, instrument: Instrument) -> list[NumberDataPoint]:
        """Read a counter or a gauge; what is not finite is left out."""
        return [NumberDataPoint(*item) for item in self._values.get(instrument, {}).items() if isfinite(item[1])]

    def distributions(self, instrument: Instrument) -> list[HistogramDataPoint]:
        """Read a histogram, without exemplars."""
        series = self._buckets.get(instrument, {})
        return [HistogramDataPoint(labels, tuple(one.counts), one.sum, {}) for labels, one in series.items()]


def label(text: str) -> str:
    """Return a label's value that every format can carry, of a sane length."""
    return text[:MAX_LABEL].encode("utf-8", "replace").decode()
