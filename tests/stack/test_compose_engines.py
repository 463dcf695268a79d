"""Test the stack in containers up to the engine's command line, with a stand-in for the engine."""

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from support.fake_container_engine import Engine
from support.stack_command import Stack

from torchotel.stack.paths import shipped

pytestmark = pytest.mark.program

PODMAN = ("podman", "podman-compose")


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path / "bin")


@pytest.fixture
def stack(tmp_path: Path, engine: Engine) -> Iterator[Stack]:
    made = Stack(tmp_path)
    made.environ["PATH"] = str(engine.folder)
    yield made
    made("down")


def test_another_terminal_finds_the_ports(stack: Stack, engine: Engine) -> None:
    """`status` and a second `up` use the ports of the running stack, whatever the terminal's variables."""
    engine.install("docker")
    assert stack("up").returncode == 0
    status = stack.elsewhere("status")
    assert status.returncode == 0, status.stdout
    addresses = [line.split()[2].split("/")[2] for line in status.stdout.splitlines()]
    names = ("JAEGER_PORT", "PROMETHEUS_PORT", "OTLP_HTTP_PORT", "GRAFANA_PORT")
    assert addresses == [f"localhost:{stack.ports[name]}" for name in names]
    assert stack.elsewhere("up").returncode == 0
    other = stack.elsewhere("up", JAEGER_PORT="26686")
    assert other.returncode == 1
    assert other.stderr.startswith(
        "the stack is up on other ports, so nothing was started: run torchotel stack down first"
    )


def test_a_start_that_leaves_no_container_leaves_no_stack(stack: Stack, engine: Engine) -> None:
    """Without a registry no image is pulled. Afterwards a stack of another kind can be started."""
    engine.install("docker")
    engine.let_up_fail()
    failed = stack("up")
    assert failed.returncode == 1
    assert "may still run" not in failed.stderr
    assert stack("down").stderr.startswith("no stack is up")


def test_the_engine_that_brought_it_up_takes_it_down(stack: Stack, engine: Engine) -> None:
    """`down` uses the engine that started the stack, even if a preferred engine has been installed meanwhile."""
    engine.install(*PODMAN)
    assert stack("up").returncode == 0
    engine.install("docker")
    assert stack("up").returncode == 0
    assert stack("down").returncode == 0
    assert [line.split()[:2] for line in engine.told()] == [
        ["podman-compose", "up"],
        ["podman-compose", "up"],
        ["podman-compose", "down"],
    ]


def test_a_folder_that_was_chosen_is_told_and_kept(stack: Stack, engine: Engine, tmp_path: Path) -> None:
    """The chosen discovery folder is printed for a shell, and kept for other terminals."""
    engine.install("docker")
    chosen = str(tmp_path / "whose targets")
    for up in (stack("up", TORCHOTEL_DISCOVERY_DIR=chosen), stack("up")):
        assert stack.variables(up.stdout)["TORCHOTEL_DISCOVERY_DIR"] == chosen
    assert [line.endswith(f" {chosen}") for line in engine.told()] == [True, True]
    other = stack("up", TORCHOTEL_DISCOVERY_DIR=str(tmp_path))
    assert other.returncode == 1
    assert other.stderr.startswith(f"the stack that is up scrapes the targets in {chosen}, so nothing was started")


def test_what_knows_no_variables_is_written(stack: Stack, engine: Engine) -> None:
    """Generated files have the ports: Prometheus's targets, and the links of Jaeger's page to Grafana."""
    engine.install("docker")
    assert stack("up").returncode == 0
    written = Path(engine.told()[0].split()[2])
    (found,) = json.loads((written / "prometheus" / "collector.json").read_text())
    ports = (stack.ports["COLLECTOR_METRICS_PORT"], stack.ports["COLLECTOR_TELEMETRY_PORT"])
    assert found == {"targets": [f"127.0.0.1:{port}" for port in ports]}
    links = json.loads((written / "jaeger" / "ui.json").read_text())["linkPatterns"]
    assert links
    assert {urlsplit(link["url"]).netloc for link in links} == {f"localhost:{stack.ports['GRAFANA_PORT']}"}


@pytest.mark.parametrize("small", [False, True], ids=["into the Collector", "into Prometheus"])
def test_where_nothing_is_scraped_metrics_are_pushed(stack: Stack, engine: Engine, *, small: bool) -> None:
    """Without scraping, metrics are pushed at the interval that the dashboards expect."""
    engine.install("docker", system="Docker Desktop")
    up = stack("up", *(["--small"] if small else []))
    receiver = f"http://localhost:{stack.ports['PROMETHEUS_PORT']}/api/v1/otlp/v1/metrics"
    assert stack.variables(up.stdout) == {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://localhost:{stack.ports['OTLP_HTTP_PORT']}",
        "OTEL_METRICS_EXPORTER": "otlp",
        "OTEL_METRIC_EXPORT_INTERVAL": f"{1000 * grafana_reckons_with_s()}",
        **({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": receiver} if small else {}),
    }


def grafana_reckons_with_s() -> int:
    sources = yaml.safe_load((shipped() / "grafana/provisioning/datasources/torchotel.yaml").read_text())
    return int(sources["datasources"][0]["jsonData"]["timeInterval"].removesuffix("s"))
