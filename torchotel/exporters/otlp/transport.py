"""The interface between the sender and HTTP or gRPC."""

from typing import NamedTuple, Protocol

from torchotel.config.otlp_endpoint import OtlpEndpoint


class Reply(NamedTuple):
    """What came of an attempt; all of its items arrived where nothing else is said."""

    error_type: str | None = None
    """An HTTP status, a gRPC status or a class of exception; None: the request was taken."""
    text: str = ""
    """What happened, for a log line: an endpoint's words as `Receiver.quote` gives them, also of what it took."""
    retry: bool = False
    """Whether another attempt may go better."""
    answered: bool = True
    """Whether anybody was there."""
    retry_after_s: float | None = None
    """The wait that the endpoint asks for."""
    rejected: int = 0
    """Items that a request which was taken lost all the same."""


class Transport(Protocol):
    """A way to an endpoint. Every method is called on the sender's thread."""

    endpoint: str
    """Where it leads, for a log line: without credentials."""

    def pack(self, body: bytes) -> bytes:
        """Make of a request what `send` takes, once for all its attempts."""

    def send(self, body: bytes, timeout_s: float | None) -> Reply:
        """Attempt once, not longer than `timeout_s` or its own limit, whichever is less; never raise."""

    def close(self) -> None:
        """Let go of connections."""


def taken(content: bytes, receiver: OtlpEndpoint) -> Reply:
    """Look for what the endpoint took the request without; a plain success has no content."""
    if not content:
        return Reply()
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (  # noqa: PLC0415  # sending does not need protobuf
        ExportTraceServiceResponse,
    )

    try:
        # The answers of all signals have the same fields with the same numbers.
        partial = ExportTraceServiceResponse.FromString(content).partial_success
    except Exception:  # noqa: BLE001  # some servers answer with a page or JSON; the status is what counts
        return Reply()
    return Reply(rejected=max(0, partial.rejected_spans), text=receiver.quote(partial.error_message))


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
