"""What a training says arrives in a real Jaeger, span by span."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import commands, digits_training
from support.backend_servers import RealServer, jaeger, own_ports, running
from support.jaeger_traces import STORES, JaegerApi, Said, recorded

import torchotel

pytestmark = pytest.mark.real_server

SERVICE = "digits"


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(store: str, tmp_path: Path) -> Iterator[RealServer]:
    with running(jaeger(tmp_path / "jaeger", own_ports(), memory=store == "memory")) as started:
        yield started


def trained(run: Path, **settings: Any) -> dict[str, Said]:
    """Train with each step in detail, record it, and give what was recorded; nothing may have got lost."""
    handle = torchotel.instrument(
        service_name=SERVICE, record=run, detail="all", gradient_norms=True, metrics_exporter="none", **settings
    )
    digits_training.train_all()
    handle.shutdown()
    stats, spans = handle.stats(), recorded(run)
    assert stats["spans_recorded"] == len(spans)
    assert stats["internal_errors"] == 0
    return spans


def has_one_of_everything(spans: dict[str, Said]) -> bool:
    """Tell whether the comparison compares something: events, links, failures and all types of values."""
    types = {kind for said in spans.values() for value in said.attributes.values() for kind in value}
    events = {name for said in spans.values() for _, name, _ in said.events}
    return (
        types == {"stringValue", "intValue", "doubleValue", "boolValue", "arrayValue"}
        and events >= {"exception", "torch.gradient"}
        and any(said.links for said in spans.values())
        and {said.name for said in spans.values() if said.status} >= {"torch.step", "torch.evaluation"}
    )


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_what_jaeger_has_is_what_was_recorded(protocol: str, store: str, server: RealServer, tmp_path: Path) -> None:
    """Ids, parents, names, times to the nanosecond, attributes with their types, events, links, errors, resource."""
    port = server.ports.jaeger_otlp_grpc if protocol == "grpc" else server.ports.jaeger_otlp_http
    spans = trained(tmp_path / "run", endpoint=f"http://127.0.0.1:{port}", protocol=protocol)
    assert has_one_of_everything(spans)
    api = JaegerApi(server.ports.jaeger)
    assert api.spans(said.trace_id for said in spans.values()) == STORES[store](spans)
    assert api.warnings(SERVICE) == []


def test_a_run_that_is_sent_later_is_the_same(store: str, server: RealServer, tmp_path: Path) -> None:
    """As if it had been sent while it ran."""
    spans = trained(tmp_path / "run", traces_exporter="none")
    endpoint = f"http://127.0.0.1:{server.ports.jaeger_otlp_http}"
    sent = commands.torchotel("export", "run", "--to", endpoint, cwd=tmp_path)
    assert sent.returncode == 0, sent.stderr
    assert sent.stdout == f"{len(spans):,} spans sent to {endpoint}/v1/traces\n"
    api = JaegerApi(server.ports.jaeger)
    assert api.spans(said.trace_id for said in spans.values()) == STORES[store](spans)
    assert api.warnings(SERVICE) == []
