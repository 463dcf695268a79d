"""A real gateway decides by what training says of its steps, and a real Jaeger has what it kept."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import StatusCode
from support import digits_training
from support.backend_servers import gateway, jaeger, own_ports, running
from support.jaeger_traces import JaegerApi, Said, recorded
from support.prometheus_server import until
from support.scraped_metrics import scrape
from torch.nn.modules.module import register_module_forward_pre_hook

import torchotel
from torchotel.stack.services import Ports

pytestmark = pytest.mark.real_server

SERVICE = "digits"
REASONS = ("first", "nan", "error", "slow")
"""Why training keeps a step, but for its turn."""
LONG_MS = 10**9


@pytest.fixture
def ports(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ports]:
    """Run a gateway before a Jaeger; the parameter is the percentage that it keeps of ordinary steps."""
    ports = own_ports()
    held = gateway(tmp_path / "gateway", ports, DECISION_WAIT="1s", KEPT_PERCENT=request.param)
    with running(jaeger(tmp_path / "jaeger", ports, memory=True)), running(held):
        yield ports


def endpoint(ports: Ports) -> str:
    return f"http://127.0.0.1:{ports.otlp_grpc}"


def trained(run: Path, ports: Ports) -> list[Said]:
    """Train as nobody chose, and give all that was sent."""
    with torchotel.instrument(
        service_name=SERVICE, endpoint=endpoint(ports), protocol="grpc", record=run, metrics_exporter="none"
    ) as handle:
        digits_training.train_all()
    spans = list(recorded(run).values())
    assert handle.stats()["spans_exported"] == len(spans)
    return spans


def worth_it(said: Said) -> bool:
    """Tell whether a span is a reason to keep its trace."""
    reason = said.attributes.get("torch.kept.reason", {}).get("stringValue")
    return reason in REASONS or bool(said.status) or said.name == "torch.run"


def ids(spans: list[Said]) -> set[str]:
    """Give the traces of spans."""
    return {said.trace_id for said in spans}


def decided(ports: Ports, traces: int) -> int:
    """Wait until the gateway has decided on so many traces, and give how many of them it keeps."""
    name = "otelcol_processor_tail_sampling_global_count_traces_sampled_total"  # the parser ends it so

    def counts() -> dict[str, float]:
        said = scrape(ports.collector_telemetry).series.items()
        return {dict(labels)["sampled"]: number for (one, labels), number in said if one == name}

    return int(until(counts, lambda found: sum(found.values()) == traces)["true"])


def assert_stored(ports: Ports, spans: list[Said], traces: set[str]) -> None:
    """Jaeger has these traces of what was sent, span by span, and nothing of the others."""
    expected = {said.span_id: said for said in spans if said.trace_id in traces}
    api = JaegerApi(ports.jaeger)
    assert until(lambda: api.spans(ids(spans)), lambda there: len(there) >= len(expected)) == expected


@pytest.mark.parametrize(("ports", "share"), [(0, False), (50, True)], indirect=["ports"], ids=["none", "half"])
def test_what_training_keeps_arrives_whole(ports: Ports, tmp_path: Path, *, share: bool) -> None:
    """The first steps, those that failed, went NaN or were slow, and the run; of the rest the share that was chosen."""
    spans = trained(tmp_path / "run", ports)
    kept = ids([said for said in spans if worth_it(said)])
    reasons = {said.attributes.get("torch.kept.reason", {}).get("stringValue") for said in spans}
    assert {*REASONS, "sampled", None} == reasons
    api, count = JaegerApi(ports.jaeger), decided(ports, len(ids(spans)))
    found = until(lambda: api.search(SERVICE), lambda there: len(there) == count)
    assert kept < found < ids(spans) if share else found == kept
    assert_stored(ports, spans, found)


@pytest.mark.parametrize("ports", [0], indirect=True)
def test_spans_that_come_late_share_the_fate_of_their_step(ports: Ports, tmp_path: Path) -> None:
    """Those of the program's own in each forward, sent after the decision, though they say that they failed."""
    provider = TracerProvider(resource=Resource({"service.name": SERVICE}), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint(ports), insecure=True)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=LONG_MS))
    tracer = provider.get_tracer("mine")

    def look(module: Any, _: Any) -> None:
        if isinstance(module, digits_training.Looked):
            span = tracer.start_span("late")
            span.set_status(StatusCode.ERROR)
            span.end()

    with register_module_forward_pre_hook(look):
        spans = trained(tmp_path / "run", ports)
    kept = ids([said for said in spans if worth_it(said)])
    decided(ports, len(ids(spans)))
    last = tracer.start_span("last")
    last.set_status(StatusCode.ERROR)
    last.end()
    provider.shutdown()
    api, own = JaegerApi(ports.jaeger), f"{last.get_span_context().trace_id:032x}"
    found = until(lambda: api.search(SERVICE), lambda there: own in there)
    assert found == kept | {own}
    late = [said for said in api.spans(found).values() if said.name == "late"]
    assert ids(late) == kept - ids([said for said in spans if said.name == "torch.run"])


def test_what_is_undecided_at_the_end_is_decided(tmp_path: Path) -> None:
    """A gateway that is asked to end does not take with it what it waits for the rest of."""
    ports = own_ports()
    held = gateway(tmp_path / "gateway", ports, DECISION_WAIT="1h", KEPT_PERCENT=0)
    with running(jaeger(tmp_path / "jaeger", ports, memory=True)), running(held):
        spans = trained(tmp_path / "run", ports)
        held.stop()
        held.start()  # its queue is on the disk
        assert_stored(ports, spans, ids([said for said in spans if worth_it(said)]))
