"""A real OTLP/gRPC receiver on loopback."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import (
    MetricsServiceServicer,
    add_MetricsServiceServicer_to_server,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Refusal(NamedTuple):
    """What the receiver says instead of OK."""

    code: grpc.StatusCode
    retry_after_s: float | None = None
    """Put into a RetryInfo."""


class Call(NamedTuple):
    """One call, whatever it was answered."""

    message: ExportTraceServiceRequest
    metadata: dict[str, str | bytes]


class GrpcReceiver(TraceServiceServicer, MetricsServiceServicer):
    """Keep all that comes; answer with what `answers` holds first, then with OK."""

    def __init__(self, address: str = "127.0.0.1:0", credentials: grpc.ServerCredentials | None = None) -> None:
        self.answers: deque[Refusal | ExportTraceServiceResponse] = deque()
        self.always: Refusal | ExportTraceServiceResponse | None = None
        """What is said once there is nothing else to say; None: OK."""
        self.may_answer = threading.Event()
        """Cleared: every answer waits."""
        self.may_answer.set()
        self.calls: list[Call] = []
        self.spans: list[Span] = []
        """Spans of the calls that were answered with OK."""
        self.pushed: list[ExportMetricsServiceRequest] = []
        self._changed = threading.Condition()
        self._server = grpc.server(ThreadPoolExecutor(2))
        add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]  # generated
        add_MetricsServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]  # generated
        if credentials is None:
            self.port = self._server.add_insecure_port(address)
        else:
            self.port = self._server.add_secure_port(address, credentials)
        scheme = "http" if credentials is None else "https"
        self.endpoint = f"{scheme}://localhost:{self.port}"
        self._server.start()

    def stop(self) -> None:
        """Break off what is under way, and close the port."""
        self._server.stop(None).wait()

    def Export(  # noqa: N802  # the name that gRPC calls, for both services
        self, request: ExportTraceServiceRequest | ExportMetricsServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse | ExportMetricsServiceResponse:
        self.may_answer.wait()
        with self._changed:
            self._changed.notify_all()
            answer = self.answers.popleft() if self.answers else self.always
            if isinstance(request, ExportTraceServiceRequest):
                self.calls.append(Call(request, dict(context.invocation_metadata())))
            if isinstance(answer, Refusal):
                _refuse(context, answer)
            if isinstance(request, ExportMetricsServiceRequest):
                self.pushed.append(request)
                return ExportMetricsServiceResponse()
            scopes = [scope for resource in request.resource_spans for scope in resource.scope_spans]
            self.spans += [span for scope in scopes for span in scope.spans]
            return answer if isinstance(answer, ExportTraceServiceResponse) else ExportTraceServiceResponse()

    def wait_for_calls(self, n_calls: int, timeout_s: float = 10.0) -> list[Call]:
        """Give the calls with traces when there are `n_calls` of them."""
        return self._wait(lambda: self.calls, n_calls, timeout_s)

    def _wait(self, what: Callable[[], Sequence[Call]], count: int, timeout_s: float) -> list[Call]:
        with self._changed:
            came = self._changed.wait_for(lambda: len(what()) >= count, timeout_s)
            assert came, f"{len(what())} of {count} came in {timeout_s} s"
            return list(what())


def _refuse(context: grpc.ServicerContext, refusal: Refusal) -> None:
    if refusal.retry_after_s is not None:
        info, detail = RetryInfo(), AnyMessage()
        info.retry_delay.FromNanoseconds(int(refusal.retry_after_s * 1e9))
        detail.Pack(info)
        status = Status(code=refusal.code.value[0], message="later", details=[detail])
        context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(refusal.code, "later")


@contextmanager
def grpc_receiver(
    address: str = "127.0.0.1:0", credentials: grpc.ServerCredentials | None = None
) -> Iterator[GrpcReceiver]:
    """Run a receiver."""
    server = GrpcReceiver(address, credentials)
    try:
        yield server
    finally:
        server.stop()
