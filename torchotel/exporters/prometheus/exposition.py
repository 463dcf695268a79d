"""Format metrics as Prometheus text or OpenMetrics.

prometheus_client takes 25 to 40 ms of the GIL for a model of 500 layers. This module takes a sixth of that: the name
and the labels of a series, most of a line, are cached. A test compares the samples of both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import accumulate, chain, islice

from torchotel._utils.gil import SLICE_ITEMS, GilYielder
from torchotel._utils.text import shortened
from torchotel.exporters.sanitize import otlp_safe_text
from torchotel.metrics.aggregation import Exemplar, HistogramDataPoint, Labels, MetricData
from torchotel.metrics.instruments import Instrument
from torchotel.metrics.store import Metrics
from torchotel.tracing.span import Attributes

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
MAX_HEADS = 50_000


class Exposition:
    """Format metrics as text (https://prometheus.io/docs/instrumenting/exposition_formats/) or as OpenMetrics.

    Args:
        metrics: Source of the metrics.
        resource: Labels of `target_info`, read for each scrape.
        yielder: Counts lines, to yield the GIL.
    """

    def __init__(self, metrics: Metrics, resource: Attributes, yielder: GilYielder | None = None) -> None:
        self._metrics, self._resource, self._yielder = metrics, resource, yielder or GilYielder()
        self._heads: dict[tuple[Instrument, Labels], str] = {}
        """Name and labels of each series."""

    def write(self, openmetrics: bool) -> bytes:  # noqa: FBT001  # a callback of two formats
        """Return the response to a scrape."""
        if len(self._heads) > MAX_HEADS:
            self._heads.clear()
        name, kind = ("target", "info") if openmetrics else ("target_info", "gauge")
        target = _braces([_pair(*item) for item in sorted(target_labels(self._resource).items())])
        lines = [f"# HELP {name} Target metadata\n# TYPE {name} {kind}\ntarget_info{target} 1.0\n"]
        families = (one for one in self._metrics.collect() if one.points or one.histograms)
        written = chain.from_iterable(self._family(family, openmetrics=openmetrics) for family in families)
        while more := list(islice(written, SLICE_ITEMS)):
            lines += more
            self._yielder.spend(len(more))
        if openmetrics:
            lines.append("# EOF\n")
        return "".join(lines).encode()

    def _family(self, family: MetricData, *, openmetrics: bool) -> Iterator[str]:
        instrument = family.instrument
        name, unit = instrument.prometheus_name, instrument.prometheus_unit
        if instrument.kind == "counter" and not openmetrics:
            name += "_total"
        yield f"# HELP {name} {instrument.description}\n# TYPE {name} {instrument.kind}\n"
        if openmetrics and unit:
            yield f"# UNIT {name} {unit}\n"
        for labels, value in family.points:
            yield f"{self._head(instrument, labels)} {float(value)!r}\n"
        for one in family.histograms:
            yield from _histogram(instrument, one, openmetrics=openmetrics)

    def _head(self, instrument: Instrument, labels: Labels) -> str:
        key = instrument, labels
        head = self._heads.get(key)
        if head is None:
            suffix = "_total" if instrument.kind == "counter" else ""
            head = self._heads[key] = f"{instrument.prometheus_name}{suffix}{_braces(_pairs(instrument, labels))}"
        return head


def _histogram(instrument: Instrument, one: HistogramDataPoint, *, openmetrics: bool) -> Iterator[str]:
    name, pairs = instrument.prometheus_name, _pairs(instrument, one.labels)
    bounds = [*map(repr, instrument.bounds), "+Inf"]
    totals = list(accumulate(one.counts))
    for bucket, total in enumerate(totals):
        exemplar = one.exemplars.get(bucket) if openmetrics else None
        labels = _braces(sorted([*pairs, _pair("le", bounds[bucket])]))
        yield f"{name}_bucket{labels} {float(total)!r}{_exemplar(exemplar)}\n"
    yield f"{name}_count{_braces(pairs)} {float(totals[-1])!r}\n"
    yield f"{name}_sum{_braces(pairs)} {one.sum!r}\n"


def _exemplar(exemplar: Exemplar | None) -> str:
    if exemplar is None:
        return ""
    ids = f'span_id="{exemplar.span_id:016x}",trace_id="{exemplar.trace_id:032x}"'
    return f" # {{{ids}}} {exemplar.value!r} {exemplar.unix_s!r}"


def _pairs(instrument: Instrument, labels: Labels) -> list[str]:
    return sorted(_pair(key.replace(".", "_"), text) for key, text in zip(instrument.labels, labels, strict=True))


def _pair(name: str, text: str) -> str:
    escaped = text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return f'{name}="{escaped}"'


def _braces(pairs: list[str]) -> str:
    return f"{{{','.join(pairs)}}}" if pairs else ""


def target_labels(resource: Attributes) -> dict[str, str]:
    """Return the resource as labels of bounded length; OpenTelemetry joins values of colliding names."""
    labels: dict[str, str] = {}
    for name in sorted(resource):
        value = resource[name]
        text = shortened(otlp_safe_text(value) if isinstance(value, str) else json.dumps(value))
        safe = re.sub(r"[^a-zA-Z0-9]+", "_", name)  # Prometheus reserves names that start with two underscores
        safe = f"key_{safe}" if safe[0].isdecimal() else safe
        labels[safe] = f"{labels[safe]};{text}" if safe in labels else text
    return labels
