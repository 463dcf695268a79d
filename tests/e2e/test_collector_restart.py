"""A Collector that goes away in mid-run: what retries cover arrives, and of all else it is told how much is lost."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support import digits_training
from support.backend_servers import OUTAGE_BOUNDS, RealServer, collector, jaeger, own_ports, running
from support.jaeger_traces import JaegerApi, Said, recorded
from support.prometheus_server import until
from support.scraped_metrics import scrape

import torchotel
from torchotel._handle import Handle
from torchotel.exporters.otlp.sender import Sender

pytestmark = pytest.mark.real_server


class Chain(NamedTuple):
    """A Collector before a Jaeger."""

    collector: RealServer
    jaeger: RealServer

    def arrived(self, spans: dict[str, Said], count: int) -> dict[str, Said]:
        """Give those of the recorded spans that Jaeger has, once there are so many; they are as they were recorded."""
        api, traces = JaegerApi(self.jaeger.ports.jaeger), {said.trace_id for said in spans.values()}
        found = until(lambda: api.spans(traces), lambda there: len(there) >= count)
        assert found.items() <= spans.items()
        return found


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[Chain]:
    ports = own_ports()
    behind = jaeger(tmp_path / "jaeger", ports, memory=True)
    with running(behind), running(collector(tmp_path / "collector", ports)) as before:
        yield Chain(before, behind)


@pytest.fixture
def handle(chain: Chain, tmp_path: Path) -> Handle:
    endpoint = f"http://127.0.0.1:{chain.collector.ports.otlp_http}"
    return torchotel.instrument(service_name="digits", endpoint=endpoint, record=tmp_path / "run")


def counted(handle: Handle) -> dict[str, float]:
    """Give what a scrape says of spans, zeros left out, when none is on its way; the handle must say the same."""
    series = scrape(handle.prometheus_port).series.items()
    told = {
        dict(labels)["torchotel_outcome"]: number
        for (name, labels), number in series
        if name == "torchotel_spans_total"
    }
    stats = handle.stats()
    assert told["exported"] == stats["spans_exported"]
    assert told["dropped_queue"] + told["dropped_export"] == stats["spans_dropped"]
    assert sum(told.values()) == stats["spans_recorded"]
    return {outcome: number for outcome, number in told.items() if number}


@pytest.mark.parametrize("end", [RealServer.stop, RealServer.kill], ids=["stopped", "killed"])
def test_a_restart_in_mid_run_loses_nothing(
    end: Callable[[RealServer], None], handle: Handle, chain: Chain, tmp_path: Path
) -> None:
    """What it took before it passes on, what was recorded meanwhile waits and comes."""
    digits_training.train()
    assert handle.flush()
    end(chain.collector)
    digits_training.train()
    assert not handle.flush(timeout_s=1)
    chain.collector.start()
    digits_training.train()
    assert handle.flush(60)
    spans = recorded(tmp_path / "run")
    assert counted(handle) == {"exported": len(spans)}
    assert chain.arrived(spans, len(spans)).keys() == spans.keys()


def test_what_was_taken_outlives_the_collector(handle: Handle, chain: Chain, tmp_path: Path) -> None:
    """It is killed while Jaeger is away; what it said it had is on its disk."""
    chain.jaeger.stop()
    digits_training.train()
    assert handle.flush()
    chain.collector.kill()
    chain.jaeger.start()
    chain.collector.start()
    spans = recorded(tmp_path / "run")
    assert counted(handle) == {"exported": len(spans)}
    assert chain.arrived(spans, len(spans)).keys() == spans.keys()


@pytest.fixture(params={"retry": "dropped_export", "max_requests": "dropped_queue"}.items(), ids="{0[0]}".format)
def outcome(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make one of the bounds small, and say as what is counted that goes beyond it; asked for before `handle`."""
    bound, outcome = request.param
    defaults = Sender.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, bound, OUTAGE_BOUNDS[bound])
    return str(outcome)


def test_what_a_long_outage_loses_is_counted(outcome: str, handle: Handle, chain: Chain, tmp_path: Path) -> None:
    """Jaeger has as many as are said to be exported, and of those that it lacks none was recorded at another time."""
    digits_training.train()
    assert handle.flush()
    before = recorded(tmp_path / "run")
    chain.collector.stop()
    for _ in range(4):
        digits_training.train()
        assert not handle.flush(timeout_s=1)
    until(lambda: handle.stats()["spans_dropped"], bool)
    chain.collector.start()
    handle.flush(60)
    until_back = recorded(tmp_path / "run")
    digits_training.train()
    assert handle.flush()
    spans, counts = recorded(tmp_path / "run"), counted(handle)
    assert counts.keys() == {"exported", outcome}
    assert sum(counts.values()) == len(spans)
    found = chain.arrived(spans, int(counts["exported"]))
    assert len(found) == counts["exported"]
    assert spans.keys() - found.keys() <= until_back.keys() - before.keys()
