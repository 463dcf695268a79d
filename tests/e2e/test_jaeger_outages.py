"""A Jaeger that goes away in mid-run: what the retries cover comes, of all else it is known how much is lost."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support import digits_training
from support.backend_servers import OUTAGE_BOUNDS, RealServer, jaeger, own_ports, running
from support.jaeger_traces import JaegerApi, Said, on_badger, recorded
from support.prometheus_server import until

import torchotel
from torchotel._handle import Handle
from torchotel.exporters.otlp.sender import Sender

pytestmark = pytest.mark.real_server

PROTOCOLS = ["http/protobuf", "grpc"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RealServer]:
    """Run a Jaeger that keeps what it has on the disk."""
    with running(jaeger(tmp_path / "jaeger", own_ports())) as started:
        yield started


def instrument(server: RealServer, protocol: Any, run: Path) -> Handle:
    ports = server.ports
    port = ports.jaeger_otlp_grpc if protocol == "grpc" else ports.jaeger_otlp_http
    return torchotel.instrument(
        service_name="digits",
        endpoint=f"http://127.0.0.1:{port}",
        protocol=protocol,
        record=run,
        metrics_exporter="none",
    )


def stored(server: RealServer, spans: dict[str, Said]) -> dict[str, Said]:
    """Give those of the recorded spans that Jaeger has; it must have them as they were recorded."""
    found = JaegerApi(server.ports.jaeger).spans(said.trace_id for said in spans.values())
    assert found.items() <= on_badger(spans).items()
    return found


def lost(handle: Handle, server: RealServer, run: Path) -> set[str]:
    """Give the spans that Jaeger has not, though they were recorded; the counts must be those."""
    stats, spans = handle.stats(), recorded(run)
    found = stored(server, spans)
    assert stats["spans_recorded"] == len(spans)
    assert stats["spans_exported"] == len(found)
    assert stats["spans_dropped"] == len(spans) - len(found) > 0
    return spans.keys() - found.keys()


@pytest.mark.parametrize("end", [RealServer.stop, RealServer.kill], ids=["stopped", "killed"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_restart_in_mid_run_loses_nothing(
    protocol: str, end: Callable[[RealServer], None], server: RealServer, tmp_path: Path
) -> None:
    """What it took before is on its disk, what was recorded meanwhile waits and comes."""
    handle = instrument(server, protocol, tmp_path / "run")
    digits_training.train()
    assert handle.flush()

    def restart() -> None:
        end(server)
        until(lambda: handle.stats()["export_errors"], bool)
        server.start()

    with ThreadPoolExecutor() as pool:
        restarted = pool.submit(restart)
        while not restarted.done():
            digits_training.train()
        restarted.result()
    assert handle.flush(60)
    handle.shutdown()
    stats, spans = handle.stats(), recorded(tmp_path / "run")
    assert (stats["spans_exported"], stats["spans_dropped"]) == (len(spans), 0)
    assert stored(server, spans).keys() == spans.keys()


@pytest.mark.parametrize("bound", OUTAGE_BOUNDS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_a_long_outage_loses_is_counted(
    protocol: str, bound: str, server: RealServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jaeger has as many as are said to be exported, and what it lacks is of the outage."""
    defaults = Sender.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, bound, OUTAGE_BOUNDS[bound])
    handle = instrument(server, protocol, tmp_path / "run")
    digits_training.train()
    assert handle.flush()
    before = recorded(tmp_path / "run")
    server.stop()
    for _ in range(4):
        digits_training.train()
        assert not handle.flush(timeout_s=1)
    until(lambda: handle.stats()["spans_dropped"], bool)
    server.start()
    handle.flush(60)
    until_back = recorded(tmp_path / "run")
    digits_training.train()
    assert handle.flush()
    handle.shutdown()
    assert lost(handle, server, tmp_path / "run") <= until_back.keys() - before.keys()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_a_run_s_end_loses_is_counted(protocol: str, server: RealServer, tmp_path: Path) -> None:
    """Nobody is there when it ends, and it does not wait."""
    handle = instrument(server, protocol, tmp_path / "run")
    digits_training.train()
    assert handle.flush()
    before = recorded(tmp_path / "run")
    server.stop()
    digits_training.train()
    handle.shutdown()
    server.start()
    assert lost(handle, server, tmp_path / "run") == recorded(tmp_path / "run").keys() - before.keys()
