"""Interface between the sender and HTTP or gRPC."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from torchotel.config.otlp_endpoint import OtlpEndpoint

if TYPE_CHECKING:  # the exporters of the console and of Prometheus do not need protobuf
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse


class Reply(NamedTuple):
    """Result of an attempt; by default the endpoint accepted all items."""

    error_type: str | None = None
    """HTTP status, gRPC status or class of an exception; None: the endpoint accepted the request."""
    text: str = ""
    """Description for the log; the endpoint's text is quoted by `OtlpEndpoint.quote`."""
    retry: bool = False
    """Whether another attempt may succeed."""
    answered: bool = True
    """Whether the endpoint responded."""
    retry_after_s: float | None = None
    """Delay that the endpoint asks for."""
    rejected: int = 0
    """Items that the endpoint rejected from an accepted request."""


class Transport(Protocol):
    """Connection to an endpoint. It is used by one thread, and `pack` by any."""

    endpoint: str
    """Address for the log, without credentials."""

    def pack(self, body: bytes) -> bytes:
        """Prepare a request for `send`, once for all attempts."""

    def send(self, body: bytes, timeout_s: float | None) -> Reply:
        """Send once, with a timeout of `timeout_s` or the configured timeout if it is shorter; never raises."""

    def close(self) -> None:
        """Close connections."""


def read_success(content: bytes, message: type[ExportTraceServiceResponse], otlp_endpoint: OtlpEndpoint) -> Reply:
    """Read the response of an accepted request, which may name rejected items; it is usually empty.

    Args:
        content: The response.
        message: Class that parses the responses of all signals, since these have the same fields.
        otlp_endpoint: Endpoint that responded.
    """
    try:
        partial = message.FromString(content).partial_success
    except Exception:  # noqa: BLE001  # some servers respond with HTML or JSON; the status suffices
        return Reply()
    return Reply(rejected=max(0, partial.rejected_spans), text=otlp_endpoint.quote(partial.error_message))


class Signal(NamedTuple):
    """A signal of OTLP."""

    name: str
    """Name in variables and paths."""
    items: str
    """Items of its requests, for the log."""
    method: str
    """Method of its gRPC service."""


TRACES = Signal("traces", "spans", "/opentelemetry.proto.collector.trace.v1.TraceService/Export")
METRICS = Signal("metrics", "data points", "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export")
