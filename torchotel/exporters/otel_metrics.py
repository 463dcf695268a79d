"""Metrics as instruments of an OpenTelemetry MeterProvider."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary

from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Histogram, MeterProvider
from opentelemetry.metrics import Observation as OtelObservation

from torchotel import _names as names
from torchotel.exporters.flushing import ProviderFlush
from torchotel.exporters.outlets import MetricsOutlet
from torchotel.telemetry.accumulators import Labels
from torchotel.telemetry.identities import context_of
from torchotel.telemetry.instruments import TABLE, Instrument
from torchotel.telemetry.metrics import Metrics, Observation


class _Source:
    """What a provider's callbacks read: they can't be taken back, so they outlive a session and hold only this."""

    def __init__(self) -> None:
        self.metrics: Metrics | None = None

    def reader(self, instrument: Instrument) -> Callable[[CallbackOptions], Iterable[OtelObservation]]:
        def read(_: CallbackOptions) -> list[OtelObservation]:
            points = [] if self.metrics is None else self.metrics.points(instrument)
            return [OtelObservation(value, _attributes(instrument, labels)) for labels, value in points]

        return read


_sources: WeakKeyDictionary[MeterProvider, _Source] = WeakKeyDictionary()
"""An instrument that a provider has already keeps its first callback, so a later session must be read by that one."""


class ProviderInstruments:
    """Counters and gauges that a provider reads when it wants to, and histograms that get every value.

    Args:
        provider: Its readers and views apply.
        metrics: What is shown.
        version: Of torchotel, for the scope.
    """

    def __init__(self, provider: MeterProvider, metrics: Metrics, version: str) -> None:
        self._source = _sources.setdefault(provider, _Source())
        self._source.metrics = metrics
        self._meter = provider.get_meter(names.SCOPE, version, names.SCHEMA_URL)
        self._histograms: dict[Instrument, Histogram] = {}
        for instrument in TABLE:
            self._create(instrument)
        metrics.observe_with(self._record)

    def close(self) -> None:
        """Show nothing any more."""
        self._source.metrics = None
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
            span = observation.span  # sent, whatever its sampler said: its ids make a good exemplar
            context = Context() if span is None else context_of(span._replace(sampled=True))
            histogram.record(
                observation.value, _attributes(observation.instrument, observation.labels), context=context
            )


class ProviderOutlet(MetricsOutlet):
    """Metrics through a provider of the user's, which is flushed and never shut down.

    Args:
        provider: Its readers and views apply.
        metrics: What is shown.
        version: Of torchotel, for the scope.
    """

    def __init__(self, provider: MeterProvider, metrics: Metrics, version: str) -> None:
        self._instruments = ProviderInstruments(provider, metrics, version)
        self._flush = ProviderFlush(provider)

    def prepare(self) -> None:
        """Do nothing: all is there."""

    def first_step(self) -> None:
        """Do nothing: all is there."""

    def flush(self, deadline_s: float) -> bool:
        """Have the provider's readers bring out the present state."""
        return self._flush.by(deadline_s)

    def shutdown(self, deadline_s: float) -> None:
        """Have them bring out the last state, and show nothing any more."""
        self._flush.by(deadline_s)
        self._instruments.close()

    def detach(self) -> None:
        """Show nothing: a reader of the provider's may go on in the child."""
        self._instruments.close()


def _attributes(instrument: Instrument, labels: Labels) -> dict[str, str]:
    return dict(zip(instrument.labels, labels, strict=True))
