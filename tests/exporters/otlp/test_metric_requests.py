"""Metrics leave in requests of bounded size that lose and double no point."""

from collections import Counter
from collections.abc import Iterator

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from torchotel.exporters.otlp.metric_requests import split

SIZES = {"torch.steps": 1, "torch.module.time": 400, "torch.module.calls": 37, "torch.loss": 1}


def request() -> ExportMetricsServiceRequest:
    """Make metrics with so many points, a counter or a gauge each."""
    message = ExportMetricsServiceRequest()
    scope = message.resource_metrics.add(schema_url="schema").scope_metrics.add()
    scope.scope.name = "torchotel"
    for number, (name, points) in enumerate(SIZES.items()):
        metric = scope.metrics.add(name=name, unit="s")
        kind = metric.gauge if number % 2 else metric.sum
        for value in range(points):
            kind.data_points.add(as_int=value, time_unix_nano=7)
    return message


def points(message: ExportMetricsServiceRequest) -> Iterator[tuple[str, str, int]]:
    for resource in message.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                found = getattr(metric, metric.WhichOneof("data") or "").data_points
                assert found, "a metric without a point"
                yield from ((scope.scope.name, metric.name, point.as_int) for point in found)


def test_small_ones_stay_whole() -> None:
    assert [part is whole for whole in [request()] for part in split(whole, 1_000_000)] == [True]


@pytest.mark.parametrize("max_bytes", [4000, 500, 1])
def test_large_ones_are_split(max_bytes: int) -> None:
    """Every point is in one part, below its metric, scope and resource; a part is too large only with one point."""
    whole = request()
    parts = list(split(request(), max_bytes))
    assert sum((Counter(points(part)) for part in parts), Counter()) == Counter(points(whole))
    assert all(part.ByteSize() <= max_bytes or len(list(points(part))) == 1 for part in parts)
    assert {part.resource_metrics[0].schema_url for part in parts} == {"schema"}
