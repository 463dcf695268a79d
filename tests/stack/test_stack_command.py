"""Test `torchotel stack` with real servers: start, a run, stop, and messages on failures."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.foreign_server import stranger
from support.prometheus_server import until
from support.server_binaries import built
from support.stack_command import Stack
from support.waiting_training import STEPS, held_training

from torchotel.stack.binaries import BACKENDS, JAEGER, PROMETHEUS
from torchotel.stack.services import Ports, servers, serves_web_ui

pytestmark = pytest.mark.program


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    made = Stack(tmp_path)
    yield made
    made("down")


@pytest.fixture
def _built() -> None:
    for backend in BACKENDS:
        built(backend)


@pytest.mark.usefixtures("_built")
@pytest.mark.parametrize("small", [False, True], ids=["through the Collector", "straight to Jaeger"])
def test_a_run_is_seen_without_a_container(stack: Stack, tmp_path: Path, *, small: bool) -> None:
    """`up` prints all variables that a training needs, and `down` ends all processes."""
    up = stack("up", "--native", *(["--small"] if small else []))
    assert up.returncode == 0, up.stderr
    said = stack.variables(up.stdout)
    assert set(said) == {"OTEL_EXPORTER_OTLP_ENDPOINT"}  # since the ports are not the defaults
    with held_training(tmp_path, XDG_STATE_HOME=stack.environ["XDG_STATE_HOME"], **said):
        query = f"/api/v1/query?query=torch_steps_total=={STEPS}"
        (steps,) = until(lambda: json.loads(stack.ask("PROMETHEUS", query))["data"]["result"], bool)
        assert steps["metric"]["job"] == "digits"
    until(lambda: json.loads(stack.ask("JAEGER", "/api/services"))["data"] or [], lambda names: "digits" in names)
    assert "torchotel-layers" not in stack.ask("JAEGER", "/search")  # no link to Grafana, which is not part of it
    status = stack("status")
    assert status.returncode == 0, status.stdout
    servers = ["jaeger", "prometheus"] + ([] if small else ["collector"])
    assert [line.split()[:2] for line in status.stdout.splitlines()] == [[name, "healthy"] for name in servers]
    assert stack("down").returncode == 0
    status = stack("status")
    assert status.returncode == 1
    assert status.stderr.startswith("no stack is up")
    for port in stack.ports.values():
        socket.create_server(("127.0.0.1", int(port))).close()


@pytest.mark.usefixtures("_built")
def test_a_server_that_was_killed_is_down_and_comes_back(stack: Stack) -> None:
    """A killed server is reported as down, and a second `up` starts it without restarting the others."""
    assert stack("up", "--native").returncode == 0
    before = {line.split()[0]: line.split()[-1] for line in stack("status").stdout.splitlines()}
    stack.kill("collector")
    (down,) = (line for line in stack("status").stdout.splitlines() if line.startswith("collector"))
    assert "Everything is ready" in Path(down.rpartition(" log ")[2]).read_text()
    assert stack("up", "--native").returncode == 0
    after = {line.split()[0]: line.split()[-1] for line in stack("status").stdout.splitlines()}
    assert {name for name in after if after[name] != before[name]} == {"collector"}
    other = stack("up", "--native", "--small")
    assert other.returncode == 1
    assert other.stderr == (
        "a stack is up as plain processes, so no other stack was started.\n"
        "To start its stopped servers: torchotel stack up --native\n"
        "To replace it, first run: torchotel stack down\n"
    )


def test_a_taken_port_is_named_with_who_has_it(stack: Stack) -> None:
    """If a port is in use, the message names its owner, and nothing is started."""
    with socket.create_server(("127.0.0.1", int(stack.ports["JAEGER_PORT"]))):
        up = stack("up", "--native")
    assert up.returncode == 1
    assert f"  {stack.ports['JAEGER_PORT']} of jaeger: process " in up.stderr
    assert "; JAEGER_PORT sets another port\n" in up.stderr
    assert stack("down").stderr.startswith("no stack is up")


def test_a_machine_without_an_engine_is_told_what_to_do(stack: Stack, tmp_path: Path) -> None:
    up = stack("up", PATH=str(tmp_path))
    assert up.returncode == 1
    assert "docker: not installed" in up.stderr
    assert "podman: not installed" in up.stderr
    assert "torchotel stack up --native" in up.stderr


def test_up_names_the_servers_that_are_missing_and_where_to_get_them(stack: Stack, tmp_path: Path) -> None:
    up = stack("up", "--native", "--small", TORCHOTEL_BACKENDS=str(tmp_path), PATH=str(tmp_path))
    assert up.returncode == 1
    assert up.stderr == (
        "these servers were not found, so nothing was started:\n"
        f"  jaeger {JAEGER.version}: copy the binary jaeger from https://github.com/jaegertracing/jaeger/releases "
        f"to {tmp_path}/jaeger-{JAEGER.version}\n"
        f"  prometheus {PROMETHEUS.version}: copy the binaries prometheus and promtool from "
        f"https://github.com/prometheus/prometheus/releases to {tmp_path}/prometheus-{PROMETHEUS.version}\n"
        "Then run this command again.\n"
    )
    assert stack("down").stderr.startswith("no stack is up")


def test_a_port_that_is_none_is_refused(stack: Stack) -> None:
    up = stack("up", JAEGER_PORT="http")
    assert up.returncode == 1
    assert up.stderr == "JAEGER_PORT: got 'http', takes a port between 1 and 65535\n"


@pytest.mark.usefixtures("_built")
def test_what_a_failed_up_has_started_is_ended(stack: Stack) -> None:
    """After a failed `up`, all processes have ended, and no stack is up."""
    up = stack("up", "--native", JAEGER_TTL="foo")
    assert up.returncode == 1
    assert "jaeger ended at once" in up.stderr
    for port in stack.ports.values():
        socket.create_server(("127.0.0.1", int(port))).close()
    assert stack("down").stderr.startswith("no stack is up")


@pytest.mark.usefixtures("_built")
def test_a_failed_second_up_leaves_what_ran_before(stack: Stack) -> None:
    assert stack("up", "--native").returncode == 0
    stack.kill("jaeger")
    assert stack("up", "--native", JAEGER_TTL="foo").returncode == 1
    words = [line.split()[:2] for line in stack("status").stdout.splitlines()]
    assert words == [["jaeger", "down"], ["prometheus", "healthy"], ["collector", "healthy"]]


@pytest.mark.parametrize("variable", ["TORCHOTEL_DISCOVERY_DIR", "XDG_STATE_HOME"])
@pytest.mark.usefixtures("_built")
def test_a_folder_that_cannot_be_made_is_named_by_its_variable(stack: Stack, tmp_path: Path, variable: str) -> None:
    """If a folder cannot be created, the message names its variable, and nothing is started or saved."""
    (tmp_path / "file").touch()
    up = stack("up", "--native", **{variable: str(tmp_path / "file" / "inside")})
    assert up.returncode == 1
    assert f"cannot be created (Not a directory): set {variable} to another folder\n" in up.stderr
    assert stack("down").stderr.startswith("no stack is up")


@pytest.mark.usefixtures("_built")
def test_a_stack_of_which_nothing_runs_is_in_nobodys_way(stack: Stack) -> None:
    """A stack without running processes, as after a reboot, does not prevent a new `up`."""
    assert stack("up", "--native").returncode == 0
    stack.kill("jaeger", "prometheus", "collector")
    up = stack("up", "--native", "--small")
    assert up.returncode == 0, up.stderr


@pytest.mark.usefixtures("_built")
def test_a_server_without_pages_is_told(stack: Stack) -> None:
    """Without web pages, `up` prints no link to them, but where to copy the release's binary."""
    up = stack("up", "--native")
    page = stack.ask("JAEGER", "/search")
    if "not compiled with the UI assets" not in page:
        pytest.skip("this Jaeger is a release's, and has pages")
    assert "traces by service" not in up.stdout
    assert f"  {JAEGER.advice}\n" in up.stdout
    assert f"  {PROMETHEUS.advice}\n" in up.stdout


def test_a_page_that_is_there_is_seen(stack: Stack) -> None:
    (jaeger, *_) = servers(Ports.read(stack.ports), small=True, native=True)
    assert not serves_web_ui(jaeger)
    with stranger(stack.ports["JAEGER_PORT"]):
        assert serves_web_ui(jaeger)
