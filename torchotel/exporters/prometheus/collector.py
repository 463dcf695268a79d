"""Export metrics to a prometheus_client registry."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import accumulate
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import HistogramMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar as PrometheusExemplar
from prometheus_client.utils import floatToGoString

from torchotel._utils.faults import Guard
from torchotel.exporters.base import MetricExporter
from torchotel.exporters.prometheus.exposition import target_labels
from torchotel.metrics.aggregation import Exemplar, HistogramDataPoint, MetricData
from torchotel.metrics.instruments import TABLE, Instrument
from torchotel.metrics.store import Metrics
from torchotel.tracing.span import Attributes

_logger = logging.getLogger("torchotel")


class MetricsCollector(Collector):
    """Return metrics to a registry; never raises, and returns nothing after `close`.

    Args:
        metrics: Source of the metrics.
        resource: Labels of `target_info`, read for each scrape; None: no `target_info`.
        guard: Counts errors of a scrape.
    """

    def __init__(self, metrics: Metrics, resource: Attributes | None, guard: Guard) -> None:
        self._metrics: Metrics | None = metrics
        self._resource, self._guard = resource, guard

    def describe(self) -> Iterable[Metric]:
        """Return the metric families without samples, so that the registry knows their names."""
        return [_described(instrument) for instrument in TABLE]

    def collect(self) -> Iterable[Metric]:
        """Return the metric families of a scrape."""
        return self._guard.guarded(self._collect)() or ()

    def close(self) -> None:
        """Release the metrics."""
        self._metrics = None

    def _collect(self) -> list[Metric]:
        metrics = self._metrics
        if metrics is None:
            return []
        resource = self._resource
        labels = [] if resource is None else [target_labels(resource)]
        target = [InfoMetricFamily("target", "Target metadata", one) for one in labels]
        families = (family for family in metrics.collect() if family.points or family.histograms)
        return [*target, *(_metric(family) for family in families)]


_detached: WeakKeyDictionary[CollectorRegistry, MetricsCollector] = WeakKeyDictionary()
"""Collectors of the parent process in a forked child, which keep their names until a session in the child starts."""


class RegistryMetricExporter(MetricExporter):
    """Export metrics to the program's registry.

    Args:
        registry: The registry; if it has target info, none is added.
        metrics: Source of the metrics.
        resource: Attributes of the resource.
        guard: Counts errors of a scrape.
    """

    def __init__(self, registry: CollectorRegistry, metrics: Metrics, resource: Attributes, guard: Guard) -> None:
        get_target = getattr(registry, "get_target_info", None)
        has_target = get_target is not None and get_target()
        self._collector = MetricsCollector(metrics, None if has_target else resource, guard)
        self._registry: CollectorRegistry | None = registry
        if (of_parent := _detached.pop(registry, None)) is not None:
            registry.unregister(of_parent)
        try:
            registry.register(self._collector)
        except ValueError as error:
            self._registry = None
            _logger.warning(
                "The prometheus_registry has collectors of the same names, so no metrics of torchotel are in it (%s). "
                "Give another registry.",
                error,
            )

    def shutdown(self, deadline_s: float) -> None:
        """Unregister the collector."""
        self._collector.close()
        registry, self._registry = self._registry, None
        if registry is not None:
            registry.unregister(self._collector)

    def disable_after_fork(self) -> None:
        """Return no metrics in a forked child, without the registry's lock, which a thread of the parent may hold."""
        self._collector.close()
        if self._registry is not None:
            _detached[self._registry] = self._collector


def _described(instrument: Instrument) -> Metric:
    return Metric(instrument.prometheus_name, instrument.description, instrument.kind, instrument.prometheus_unit)


def _metric(family: MetricData) -> Metric:
    instrument = family.instrument
    if instrument.kind == "histogram":
        return _histogram(instrument, family.histograms)
    name, metric = instrument.prometheus_name, _described(instrument)
    sample = f"{name}_total" if instrument.kind == "counter" else name
    keys = _keys(instrument)
    for labels, value in family.points:
        metric.add_sample(sample, dict(zip(keys, labels, strict=True)), value)
    return metric


def _histogram(instrument: Instrument, histograms: Iterable[HistogramDataPoint]) -> Metric:
    metric = HistogramMetricFamily(
        instrument.prometheus_name,
        instrument.description,
        labels=_keys(instrument),
        unit=instrument.prometheus_unit,
    )
    bounds = [*map(floatToGoString, instrument.bounds), "+Inf"]
    for one in histograms:
        buckets: list[tuple[str, float] | tuple[str, float, PrometheusExemplar]] = []
        for bucket, count in enumerate(accumulate(one.counts)):
            exemplar = one.exemplars.get(bucket)
            plain = bounds[bucket], float(count)
            buckets.append(plain if exemplar is None else (*plain, _exemplar(exemplar)))
        metric.add_metric(one.labels, buckets, one.sum)
    return metric


def _exemplar(exemplar: Exemplar) -> PrometheusExemplar:
    ids = {"trace_id": f"{exemplar.trace_id:032x}", "span_id": f"{exemplar.span_id:016x}"}
    return PrometheusExemplar(ids, exemplar.value, exemplar.unix_s)


def _keys(instrument: Instrument) -> tuple[str, ...]:
    return tuple(key.replace(".", "_") for key in instrument.labels)
