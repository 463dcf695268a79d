"""Check the configurations in `deploy/` with the servers that read them."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from support.server_binaries import built, tool

from tools.backends import module_builder
from torchotel.stack import native
from torchotel.stack.binaries import COLLECTOR, JAEGER, PROMETHEUS, Backend
from torchotel.stack.paths import shipped
from torchotel.stack.services import Ports, servers

DEPLOY = shipped()
COMPOSE = Backend("compose-go", "2.16.2", ("compose-go",))  # `docker compose` reads its files with it
BUILD_COMPOSE = module_builder("github.com/compose-spec/compose-go/v2", "v2.16.2", {"compose-go": "cmd"})
DESKTOP, SMALL = "compose.desktop.yaml", "compose.small.yaml"
STACKS = [(), (DESKTOP,), (SMALL,), (DESKTOP, SMALL)]
CHECKS = {
    "jaeger": (JAEGER, None, ("validate", "--config")),
    "collector": (COLLECTOR, None, ("validate", "--config")),
    "prometheus": (PROMETHEUS, "promtool", ("check", "config")),
}
FILES = {"jaeger": "jaeger.yaml", "collector": "collector.yaml", "prometheus": "prometheus.yml"}


def check(server: str, file: Path) -> "subprocess.CompletedProcess[str]":
    backend, name, words = CHECKS[server]
    command = [str(built(backend, name)), *words, str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.real_server
@pytest.mark.parametrize("server", CHECKS)
def test_a_server_takes_its_configuration(server: str) -> None:
    done = check(server, DEPLOY / server / FILES[server])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.real_server
@pytest.mark.parametrize("server", CHECKS)
def test_a_server_refuses_a_setting_that_it_does_not_know(server: str, tmp_path: Path) -> None:
    """A server rejects an unknown setting, so the test above can fail."""
    shutil.copytree(DEPLOY / server, tmp_path / server)
    file = tmp_path / server / FILES[server]
    file.write_text(file.read_text() + "\nmisspelt: {}\n")
    done = check(server, file)
    assert done.returncode != 0
    assert "misspelt" in done.stdout + done.stderr


@pytest.mark.program
def test_the_wheel_has_the_files_of_the_stack_and_no_manifests(tmp_path: Path) -> None:
    """The wheel has the files of the stack; Kubernetes manifests stay in the checkout."""
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(words, cwd=DEPLOY.parent, check=True, capture_output=True)
    (wheel,) = tmp_path.iterdir()
    shipped = {Path(name).relative_to("torchotel") for name in zipfile.ZipFile(wheel).namelist() if "/deploy/" in name}
    files = {path.relative_to(DEPLOY.parent) for path in DEPLOY.rglob("*") if path.is_file()}
    assert files - shipped == {
        path
        for path in files
        if path.is_relative_to("deploy/kubernetes") or path.name in {"README.md", "kustomization.yaml"}
    }
    assert shipped <= files


@cache
def with_password() -> Path:
    """Copy the files with a password instead of its variable, since the server's check command reads no variables."""
    folder = Path(_copies.name) / "deploy"
    shutil.copytree(DEPLOY, folder)
    file = folder / "compose.yaml"
    file.write_text(re.sub(r"\$\{GRAFANA_PASSWORD:\?.*?\}", "chosen", file.read_text()))
    return folder


_copies = TemporaryDirectory()


def compose(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Return the compose file as `docker compose` reads it."""
    command = [str(tool(COMPOSE, BUILD_COMPOSE)), "-format", "json", "compose.yaml", *overrides]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def composed(*overrides: str, folder: Path | None = None) -> Any:
    done = compose(folder or with_password(), *overrides)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["services"]


@pytest.mark.real_server
def test_grafana_has_no_password_that_everyone_knows() -> None:
    """Grafana does not start without a chosen password, and the message names the variable to set."""
    done = compose(DEPLOY)
    assert done.returncode != 0
    assert "GRAFANA_PASSWORD" in done.stderr
    assert environment(composed()["grafana"])["GF_SECURITY_ADMIN_PASSWORD"] == "chosen"  # noqa: S105  # set above


def environment(service: Any) -> dict[str, str]:
    """Return a service's environment; merged compose files have it as a list."""
    told = service["environment"]
    return dict(told if isinstance(told, dict) else (pair.split("=", 1) for pair in told))


@pytest.mark.real_server
@pytest.mark.parametrize("overrides", STACKS, ids="+".join)
def test_the_stack_is_seen_from_this_machine_alone(overrides: tuple[str, ...]) -> None:
    """Servers in the host's network listen on loopback, and the other ports are published there."""
    services = composed(*overrides)
    for service in services.values():
        assert {port["host_ip"] for port in service.get("ports", [])} <= {"127.0.0.1"}
        assert service.get("privileged") is None
        assert service["cap_drop"] == ["ALL"]
        assert service["mem_limit"]
    in_host = {name for name, service in services.items() if service.get("network_mode") == "host"}
    assert in_host == (set() if DESKTOP in overrides else {"prometheus", "grafana"})
    if in_host:
        assert "--web.listen-address=127.0.0.1:9090" in services["prometheus"]["command"]
        assert environment(services["grafana"])["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert environment(services["grafana"])["GF_AUTH_ANONYMOUS_ENABLED"] == "false"


@pytest.mark.real_server
@pytest.mark.parametrize("overrides", STACKS, ids="+".join)
def test_all_that_is_mounted_is_there(overrides: tuple[str, ...]) -> None:
    """Every mounted path exists, since engines create missing ones as folders; only volumes are writable."""
    for service in composed(*overrides).values():
        for mount in service["volumes"]:
            if mount["type"] == "bind":
                assert Path(mount["source"]).exists(), mount
                assert mount["read_only"]


@pytest.mark.real_server
@pytest.mark.parametrize("overrides", STACKS, ids="+".join)
def test_one_server_alone_takes_otlp(overrides: tuple[str, ...]) -> None:
    """One server has the OTLP ports: Jaeger, if there is no Collector."""
    takers = {
        name
        for name, service in composed(*overrides).items()
        if not service.get("profiles") and "4318" in {port["published"] for port in service.get("ports", [])}
    }
    assert takers == {"jaeger" if SMALL in overrides else "collector"}


@pytest.mark.real_server
def test_images_are_of_the_versions_that_are_tested() -> None:
    images = {name: service["image"] for name, service in composed().items()}
    assert all(re.fullmatch(r"docker\.io/[\w/-]+:v?\d+\.\d+\.\d+", image) for image in images.values())
    for name, backend in (("jaeger", JAEGER), ("collector", COLLECTOR), ("prometheus", PROMETHEUS)):
        assert images[name].rpartition(":")[2].removeprefix("v") == backend.version


def test_every_port_that_can_be_chosen_is_known_to_the_command() -> None:
    asked = {name for file in DEPLOY.glob("compose*.yaml") for name in re.findall(r"\$\{(\w+_PORT)", file.read_text())}
    assert asked <= Ports().variables().keys()
    for file in DEPLOY.glob("*/*.yaml"):
        pairs = re.findall(r"\$\{(?:env:)?(\w+_PORT):-(\d+)\}", file.read_text())
        small = {"JAEGER_OTLP_GRPC_PORT": "4317", "JAEGER_OTLP_HTTP_PORT": "4318"}
        assert dict(pairs).items() <= {**Ports().variables(), **small}.items()


@pytest.mark.real_server
@pytest.mark.parametrize("overrides", STACKS, ids="+".join)
def test_a_container_takes_the_ports_that_were_chosen(overrides: tuple[str, ...], tmp_path: Path) -> None:
    """Containers use all ports that `up` checks, and no others."""
    names = Ports.__dataclass_fields__
    ports = Ports(**dict(zip(names, range(20000, 20000 + len(names)), strict=True)))
    chosen = ports.variables()  # substituted here, since the server's check command reads no variables
    for file in with_password().glob("compose*.yaml"):
        said = re.sub(r"\$\{(\w+):-(.*?)\}", lambda found: chosen.get(found[1], found[2]), file.read_text())
        (tmp_path / file.name).write_text(said)
    services = composed(*overrides, folder=tmp_path)
    for server in servers(ports, small=SMALL in overrides, native=False):
        service = services[server.name]
        if service.get("network_mode") == "host":
            assert all(str(port) in json.dumps(service) for port in server.ports)
        else:
            assert {port["published"] for port in service["ports"]} == {str(port) for port in server.ports}


@pytest.mark.real_server
@pytest.mark.parametrize("overrides", STACKS, ids="+".join)
def test_prometheus_runs_alike_in_containers_and_without(overrides: tuple[str, ...]) -> None:
    places = ("--config.file=", "--storage.tsdb.path=", "--web.listen-address=")
    command = composed(*overrides)["prometheus"]["command"]
    assert {word for word in command if not word.startswith(places)} == set(native.FLAGS)
