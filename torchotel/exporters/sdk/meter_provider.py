"""Export metrics through instruments of an OpenTelemetry MeterProvider."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from weakref import WeakKeyDictionary

from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Histogram, MeterProvider
from opentelemetry.metrics import Observation as OtelObservation

from torchotel import _semconv as names
from torchotel.exporters.base import MetricExporter
from torchotel.exporters.sdk.provider_flush import ProviderFlush
from torchotel.metrics.aggregation import Labels
from torchotel.metrics.instruments import TABLE, Instrument
from torchotel.metrics.store import Metrics, Observation
from torchotel.tracing.ids import context_of


class _Source:
    """Source of a provider's callbacks, which cannot be unregistered and so outlive a session.

    A monotonic sum never decreases, so the counters of a session continue those of the previous session.
    """

    def __init__(self) -> None:
        self._metrics: Metrics | None = None
        self._before: dict[Instrument, dict[Labels, float]] = {}
        self._reported: dict[Instrument, dict[Labels, float]] = {}
        self._last: dict[Instrument, dict[Labels, float]] = {}
        """Last values of an ended session."""
        self._pid = 0
        """Process in which the session ended."""

    def begin(self, metrics: Metrics) -> None:
        """Start to return the metrics of a session."""
        self._before = dict(self._reported)
        self._metrics = metrics

    def end(self) -> None:
        """Keep the last values of the session, which a reader of this process may read later."""
        if self._metrics is not None:
            self._last = {instrument: self._read(instrument) for instrument in TABLE}
            self._pid = os.getpid()
        self._metrics = None

    def disable_after_fork(self) -> None:
        """Return no values in a forked child, where another thread of the parent may hold the lock."""
        self._metrics, self._last = None, {}

    def reader(self, instrument: Instrument) -> Callable[[CallbackOptions], Iterable[OtelObservation]]:
        def read(_: CallbackOptions) -> list[OtelObservation]:
            values = self._read(instrument)
            return [OtelObservation(value, _attributes(instrument, labels)) for labels, value in values.items()]

        return read

    def _read(self, instrument: Instrument) -> dict[Labels, float]:
        metrics = self._metrics
        if metrics is None:
            return self._last.get(instrument, {}) if os.getpid() == self._pid else {}
        values = dict(metrics.points(instrument))
        if instrument.kind != "counter":
            return values
        totals = dict(self._before.get(instrument, {}))
        for labels, value in values.items():
            totals[labels] = totals.get(labels, 0.0) + value
        self._reported[instrument] = totals
        return totals


_sources: WeakKeyDictionary[MeterProvider, _Source] = WeakKeyDictionary()
"""A provider keeps the first callback of an instrument, so later sessions share its source."""


class ProviderInstruments:
    """Observable counters and gauges of a provider, and histograms that record every value.

    Args:
        provider: The provider, whose readers and views apply.
        metrics: Source of the metrics.
        version: Version of torchotel, for the scope.
    """

    def __init__(self, provider: MeterProvider, metrics: Metrics, version: str) -> None:
        self._source = _Source()
        with suppress(TypeError):  # a provider that has no hash or no weak references; it has one session
            self._source = _sources.setdefault(provider, self._source)
        self._source.begin(metrics)
        self._meter = provider.get_meter(names.SCOPE, version, names.SCHEMA_URL)
        self._histograms: dict[Instrument, Histogram] = {}
        for instrument in TABLE:
            self._create(instrument)
        metrics.observe_with(self._record)

    def close(self) -> None:
        """Keep the last values until the next session, whose counters continue from them."""
        self._source.end()
        self._histograms.clear()

    def disable_after_fork(self) -> None:
        """Return no values in a forked child."""
        self._source.disable_after_fork()
        self._histograms.clear()

    def _create(self, instrument: Instrument) -> None:
        name, unit, description = instrument.name, instrument.unit, instrument.description
        if instrument.kind == "histogram":
            self._histograms[instrument] = self._meter.create_histogram(
                name, unit, description, explicit_bucket_boundaries_advisory=instrument.bounds
            )
        elif instrument.kind == "counter":
            self._meter.create_observable_counter(name, [self._source.reader(instrument)], unit, description)
        else:
            self._meter.create_observable_gauge(name, [self._source.reader(instrument)], unit, description)

    def _record(self, observation: Observation) -> None:
        histogram = self._histograms.get(observation.instrument)
        if histogram is not None:
            span = observation.span  # exported, whether it was sampled or kept late: a valid exemplar
            context = Context() if span is None else context_of(span._replace(sampled=True))
            histogram.record(
                observation.value, _attributes(observation.instrument, observation.labels), context=context
            )


class MeterProviderExporter(MetricExporter):
    """Export metrics through the program's provider, which is flushed and never shut down.

    Args:
        provider: The provider, whose readers and views apply.
        metrics: Source of the metrics.
        version: Version of torchotel, for the scope.
    """

    def __init__(self, provider: MeterProvider, metrics: Metrics, version: str) -> None:
        self._instruments = ProviderInstruments(provider, metrics, version)
        self._provider_flush = ProviderFlush(provider)

    def flush(self, deadline_s: float) -> bool:
        """Flush the provider's readers."""
        return bool(self._provider_flush.flush_by(deadline_s))

    def shutdown(self, deadline_s: float) -> None:
        """Flush the provider's readers and keep the last values for later reads."""
        self._provider_flush.flush_by(deadline_s)
        self._instruments.close()

    def disable_after_fork(self) -> None:
        """Return no values: a reader of the provider may run in the child."""
        self._instruments.disable_after_fork()


def _attributes(instrument: Instrument, labels: Labels) -> dict[str, str]:
    return dict(zip(instrument.labels, labels, strict=True))
