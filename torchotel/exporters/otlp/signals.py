"""What differs between the signals on their way out."""

from typing import NamedTuple


class Signal(NamedTuple):
    """One kind of telemetry."""

    name: str
    """As variables and paths have it."""
    items: str
    """What its requests hold, for log lines."""
    method: str
    """gRPC's name of its service's only method."""


TRACES = Signal("traces", "spans", "/opentelemetry.proto.collector.trace.v1.TraceService/Export")
METRICS = Signal("metrics", "data points", "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export")
