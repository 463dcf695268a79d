"""A fork never comes in the middle of an import by torchotel: its threads import nothing."""

from pathlib import Path

import grpc
import pytest
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)
from support.commands import python
from support.otlp_grpc_receiver import GrpcReceiver, Refusal, grpc_receiver
from support.otlp_http_receiver import Answer, receiver, rejected

pytestmark = pytest.mark.program

PROGRAM = """
import sys, threading, torch, torchotel

imported = []

class Watch:
    def find_spec(self, name, path=None, target=None):
        if threading.current_thread().name.startswith("torchotel"):
            imported.append(name)

sys.meta_path.insert(0, Watch())
handle = torchotel.instrument(endpoint=sys.argv[1], protocol=sys.argv[2], metrics_exporter=sys.argv[3], detail="all")
net = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(net.parameters())
for _ in range(2):
    net(torch.randn(1, 2)).sum().backward()
    optimizer.step()
torchotel.log(loss=1.0)
flushed = handle.flush(60)
print(flushed, handle.stats()["export_errors"], imported)
"""


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_threads_import_nothing(protocol: str, tmp_path: Path) -> None:
    """In a child that is forked during another thread's import, Python never releases the lock of that import."""
    with grpc_receiver() if protocol == "grpc" else receiver() as server:
        url = server.endpoint if isinstance(server, GrpcReceiver) else server.url.removesuffix("/v1/traces")
        done = python("-c", PROGRAM, url, protocol, "prometheus,otlp", cwd=tmp_path, OTEL_EXPORTER_PROMETHEUS_PORT="0")
    assert done.stdout == "True 0 []\n", done.stderr


def test_http_threads_import_nothing_for_errors_and_rejected_spans(tmp_path: Path) -> None:
    """Reading an error response and a partial success needs protobuf, which is imported before."""
    with receiver() as server:
        error = Status(message="overloaded").SerializeToString()
        server.answers += [Answer(503, {"Content-Type": "application/x-protobuf"}, error), rejected(1, "too old")]
        url = server.url.removesuffix("/v1/traces")
        done = python("-c", PROGRAM, url, "http/protobuf", "none", cwd=tmp_path)
    assert "503 Service Unavailable: overloaded" in done.stderr
    assert "rejected 1 spans: too old" in done.stderr
    assert done.stdout == "False 2 []\n", done.stderr


def test_grpc_threads_import_nothing_for_errors_and_rejected_spans(tmp_path: Path) -> None:
    """Reading the delay of an error response and a partial success needs protobuf, which is imported before."""
    partial = ExportTracePartialSuccess(rejected_spans=1, error_message="too old")
    with grpc_receiver() as server:
        server.answers.append(Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after_s=0.1))
        server.answers.append(ExportTraceServiceResponse(partial_success=partial))
        done = python("-c", PROGRAM, server.endpoint, "grpc", "none", cwd=tmp_path)
    assert "rejected 1 spans: too old" in done.stderr
    assert done.stdout == "False 2 []\n", done.stderr
