"""A fork never comes in the middle of an import by torchotel: its threads import nothing."""

from pathlib import Path

import pytest
from support.commands import python
from support.otlp_grpc_receiver import GrpcReceiver, grpc_receiver
from support.otlp_http_receiver import receiver

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
assert handle.flush(60), handle.stats()
print(imported)
"""


@pytest.mark.parametrize("metrics", ["prometheus", "otlp", "prometheus,otlp"])
@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_threads_import_nothing(protocol: str, metrics: str, tmp_path: Path) -> None:
    """In a child that is forked during another thread's import, Python never releases the lock of that import."""
    with grpc_receiver() if protocol == "grpc" else receiver() as server:
        url = server.endpoint if isinstance(server, GrpcReceiver) else server.url.removesuffix("/v1/traces")
        done = python("-c", PROGRAM, url, protocol, metrics, cwd=tmp_path, OTEL_EXPORTER_PROMETHEUS_PORT="0")
    assert done.stdout == "[]\n", done.stderr
