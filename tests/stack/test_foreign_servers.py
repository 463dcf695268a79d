"""Test that another program on a port is never reported as a server of the stack."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fake_container_engine import Engine
from support.foreign_server import stranger
from support.server_binaries import built
from support.stack_command import Stack

from torchotel.stack.binaries import BACKENDS


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    made = Stack(tmp_path)
    yield made
    made("down")


@pytest.fixture
def native(stack: Stack) -> Stack:
    for backend in BACKENDS:
        built(backend)
    return stack


@pytest.mark.real_server
@pytest.mark.parametrize("killed", [["prometheus"], ["jaeger", "prometheus", "collector"]], ids="+".join)
def test_nobody_takes_the_place_of_a_process_that_was_killed(native: Stack, killed: list[str]) -> None:
    assert native("up", "--native").returncode == 0
    native.kill(*killed)
    with stranger(native.ports["PROMETHEUS_PORT"]):
        assert ["prometheus", "down"] in [line.split()[:2] for line in native("status").stdout.splitlines()]
        up = native("up", "--native")
    assert up.returncode == 1
    assert f"  {native.ports['PROMETHEUS_PORT']} of prometheus: process " in up.stderr


@pytest.mark.program
def test_nobody_takes_the_place_of_a_container(stack: Stack, tmp_path: Path) -> None:
    """A stopped container is down even if another program answers on its port, whatever COMPOSE_PROJECT_NAME is."""
    engine = Engine(tmp_path / "bin")
    engine.install("docker")
    stack.environ |= {"PATH": str(engine.folder), "COMPOSE_PROJECT_NAME": "mine"}
    assert stack("up").returncode == 0
    assert stack("status").returncode == 0
    engine.end_containers()
    with stranger(stack.ports["PROMETHEUS_PORT"]):
        status, up = stack("status"), stack("up")
    assert {line.split()[1] for line in status.stdout.splitlines()} == {"down"}
    assert status.returncode == 1
    assert up.returncode == 1
    assert f"  {stack.ports['PROMETHEUS_PORT']} of prometheus: process " in up.stderr
    assert stack("up").returncode == 0  # so that there is a stack to take down


@pytest.mark.program
def test_no_stack_is_healthy_that_is_not_up(stack: Stack) -> None:
    with stranger(stack.ports["PROMETHEUS_PORT"]), stranger(stack.ports["JAEGER_PORT"]):
        status = stack("status")
    assert status.returncode == 1
    assert status.stdout == ""
    assert status.stderr.splitlines() == [
        "no stack is up; torchotel stack up starts one",
        f"  another program answers at http://localhost:{stack.ports['JAEGER_PORT']}/api/services",
        f"  another program answers at http://localhost:{stack.ports['PROMETHEUS_PORT']}/-/ready",
    ]


@pytest.mark.program
def test_two_servers_are_not_given_the_same_port(stack: Stack) -> None:
    port = stack.ports["JAEGER_PORT"]
    up = stack("up", "--native", PROMETHEUS_PORT=port)
    assert up.returncode == 1
    assert up.stderr.splitlines() == [
        "these ports are set more than once, so nothing was started:",
        f"  {port}: JAEGER_PORT, PROMETHEUS_PORT",
        "Set different ports.",
    ]
