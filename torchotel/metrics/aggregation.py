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

MAX_PENDING = 4096
"""Steps whose trace is not exported yet; dropped traces never are."""


class Exemplar(NamedTuple):
    """One observation and its span."""

    value: float
    unix_s: float
    trace_id: int
    span_id: int


class Exemplars:
    """Keep the last exported step of each bucket; a link to a dropped trace would be useless."""

    def __init__(self) -> None:
        # Removing the first entry of a plain dictionary again and again takes ever longer.
        self._pending: OrderedDict[int, tuple[int, Exemplar]] = OrderedDict()
        self._arrived: dict[int, Exemplar] = {}

    def expect(self, bucket: int, exemplar: Exemplar) -> None:
        """Add a step whose trace is about to be exported."""
        if len(self._pending) >= MAX_PENDING:
            self._pending.popitem(last=False)
        self._pending[exemplar.trace_id] = bucket, exemplar

    def arrive(self, traces: Iterable[int]) -> None:
        """Make exemplars of the steps of traces that were exported."""
        for trace_id in traces:
            found = self._pending.pop(trace_id, None)
            if found is not None:
                bucket, exemplar = found
                self._arrived[bucket] = exemplar

    def read(self) -> dict[int, Exemplar]:
        """Return the exemplars by bucket."""
        return dict(self._arrived)


Labels: TypeAlias = tuple[str, ...]
"""Values of an instrument's labels, in the order of `Instrument.labels`."""

NO_LABELS: Labels = ()


class NumberDataPoint(NamedTuple):
    """The value of a counter or a gauge."""

    labels: Labels
    value: float


class HistogramDataPoint(NamedTuple):
    """The state of a histogram."""

    labels: Labels
    counts: Sequence[int]
    """Observations of each bucket, not cumulative; the last bucket has no bound."""
    sum: float
    exemplars: Mapping[int, Exemplar]
    """Exemplars by bucket."""


class MetricData(NamedTuple):
    """The data of one instrument at one moment: `histograms` of a histogram, else `points`."""

    instrument: Instrument
    points: Sequence[NumberDataPoint] = ()
    histograms: Sequence[HistogramDataPoint] = ()


@dataclass(slots=True, eq=False)
class _Buckets:
    counts: list[int]
    sum: float = 0.0


@dataclass(slots=True, eq=False)
class Aggregations:
    """Counters, gauges and histograms. Threads that share an object hold a lock."""

    _values: dict[Instrument, dict[Labels, float]] = field(default_factory=dict)
    _buckets: dict[Instrument, dict[Labels, _Buckets]] = field(default_factory=dict)

    def of(self, instrument: Instrument) -> dict[Labels, float]:
        """Return the values of a counter or a gauge, which the caller may change."""
        return self._values.setdefault(instrument, {})

    def add(self, instrument: Instrument, amount: float, labels: Labels = NO_LABELS) -> None:
        """Add to a counter; a negative or non-finite amount is ignored."""
        if amount >= 0 and isfinite(amount):
            values = self.of(instrument)
            values[labels] = values.get(labels, 0.0) + amount

    def set(
        self, instrument: Instrument, value: float, labels: Labels = NO_LABELS, *, limit: int | None = None
    ) -> None:
        """Set a gauge, unless this would be more than `limit` series."""
        values = self.of(instrument)
        if limit is None or labels in values or len(values) < limit:
            values[labels] = value

    def observe(self, instrument: Instrument, value: float, labels: Labels = NO_LABELS) -> int:
        """Add a value to a histogram and return its bucket."""
        buckets = self.buckets(instrument, labels)
        bucket = bisect_left(instrument.bounds, value)
        buckets.counts[bucket] += 1
        buckets.sum += value
        return bucket

    def has_room(self, histogram: Instrument, labels: Labels, limit: int) -> bool:
        """Return whether a series exists or may be added, with at most `limit` series."""
        series = self._buckets.get(histogram, {})
        return labels in series or len(series) < limit

    def buckets(self, instrument: Instrument, labels: Labels = NO_LABELS) -> _Buckets:
        """Return the buckets of a series; create them if it is new."""
        series = self._buckets.setdefault(instrument, {})
        found = series.get(labels)
        if found is None:
            found = series[labels] = _Buckets([0] * (len(instrument.bounds) + 1))
        return found

    def points(self, instrument: Instrument) -> list[NumberDataPoint]:
        """Return the finite values of a counter or a gauge."""
        return [NumberDataPoint(*item) for item in self._values.get(instrument, {}).items() if isfinite(item[1])]

    def histograms(self, instrument: Instrument) -> list[HistogramDataPoint]:
        """Return the series of a histogram, without exemplars."""
        series = self._buckets.get(instrument, {})
        return [HistogramDataPoint(labels, tuple(one.counts), one.sum, {}) for labels, one in series.items()]


def label(text: str) -> str:
    """Return a label value of bounded length that every format can encode."""
    return text[:MAX_LABEL].encode("utf-8", "replace").decode()
