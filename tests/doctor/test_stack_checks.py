"""Test the doctor's check of the stack: whether its Prometheus will find a run, and what to do."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.otlp_http_receiver import Answer, Receiver

from torchotel.config.config import Config
from torchotel.doctor import endpoint, local
from torchotel.doctor.result import Finding, Level
from torchotel.stack import paths
from torchotel.stack.compose import Engine
from torchotel.stack.manager import Kind, Stack
from torchotel.stack.native import Process
from torchotel.stack.services import Ports


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.fixture
def up() -> Iterator[Stack]:
    """Save a stack of which one process is running."""
    made = Stack(Kind(native=True), Ports(), None, paths.targets())
    made.save()
    process = Process(paths.state() / "native" / "prometheus")
    process.start(["sleep", "600"], os.environ)
    yield made
    process.stop()


@pytest.mark.usefixtures("up")
def test_links_no_page_that_the_stack_does_not_have(server: Receiver) -> None:
    """A native stack has no Grafana, and a Jaeger built without its pages is not linked."""
    server.answers.append(Answer(200, {"Content-Type": "application/x-protobuf"}))
    config = Config(endpoint=server.url.removesuffix("/v1/traces"))
    (sent,) = [finding for finding in endpoint.check(config) if finding.subject == "test span"]
    assert sent.advice.startswith("This Jaeger was built without pages: http://localhost:16686/api/traces/")
    assert "Grafana" not in sent.advice


def found(**said: str) -> Finding:
    environ = {"XDG_STATE_HOME": os.environ["XDG_STATE_HOME"], **said}
    (finding,) = local.check_stack(Config.read({}, environ), environ)
    return finding


def test_says_nothing_of_a_stack_that_is_not_up(tmp_path: Path) -> None:
    """Without a stack there is no finding, and no folder is created."""
    assert list(local.check_stack(Config.read({}, {}), os.environ)) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("up")
@pytest.mark.parametrize(
    "said",
    [
        {},
        {"OTEL_METRICS_EXPORTER": "otlp"},
        {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://localhost:9090/api/v1/otlp"},
    ],
    ids=["scraped", "through the Collector", "into Prometheus"],
)
def test_knows_the_ways_to_it(said: dict[str, str]) -> None:
    assert found(**said) == Finding(
        "stack", Level.OK, "up as plain processes; its Prometheus finds runs of this machine"
    )


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"OTEL_METRICS_EXPORTER": "none"}, "metrics_exporter is none"),
        ({"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://far:1"}, "metrics_exporter is otlp"),
        ({"OTEL_EXPORTER_PROMETHEUS_PORT": "none"}, "prometheus_port is none"),
        ({"TORCHOTEL_DISCOVERY_DIR": "elsewhere"}, "discovery_dir is elsewhere, but it reads {up.targets}"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value.split(",")[0],
)
def test_says_what_is_in_the_way(up: Stack, said: dict[str, str], why: str) -> None:
    finding = found(**said)
    assert finding.level is Level.WARNING
    assert finding.text.endswith(f"its Prometheus will not find a run: {why.format(up=up)}")
    assert finding.advice


def test_what_it_says_to_do_helps(up: Stack) -> None:
    advice = found(TORCHOTEL_DISCOVERY_DIR="elsewhere").advice
    assert found(TORCHOTEL_DISCOVERY_DIR=advice.rpartition("=")[2]).level is Level.OK


@pytest.mark.parametrize(("protocol", "port"), [("http/protobuf", 4318), ("grpc", 4317)])
def test_says_how_traces_reach_its_jaeger(up: Stack, protocol: str, port: int) -> None:
    """A stack on other ports than the default ones is not where traces go."""
    assert found(OTEL_EXPORTER_OTLP_ENDPOINT="http://far:1").level is Level.OK
    environ = {"XDG_STATE_HOME": os.environ["XDG_STATE_HOME"], "OTEL_EXPORTER_OTLP_PROTOCOL": protocol}
    here = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:25318", **environ}
    *_, finding = local.check_stack(Config.read({}, here), here)
    assert (finding.level, finding.text) == (Level.WARNING, f"up {up.kind}, but traces go to 127.0.0.1:25318")
    environ |= dict([finding.advice.rpartition(" ")[2].split("=")])
    assert environ["OTEL_EXPORTER_OTLP_ENDPOINT"] == f"http://localhost:{port}"
    (finding,) = local.check_stack(Config.read({}, environ), environ)
    assert finding.level is Level.OK


def test_without_a_collector_jaeger_takes_no_metrics(up: Stack) -> None:
    Stack(Kind(native=True, small=True), up.ports, None, up.targets).save()
    assert found(OTEL_METRICS_EXPORTER="otlp").level is Level.WARNING


def test_a_container_that_is_not_there_finds_nothing() -> None:
    """A stack in containers whose engine is missing counts as down."""
    Stack(Kind(), Ports(), Engine(("no-such-engine",), reaches_loopback=True), paths.targets()).save()
    assert list(local.check_stack(Config.read({}, {}), os.environ)) == []
