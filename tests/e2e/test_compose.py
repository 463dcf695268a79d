"""The compose file itself, run by podman on images of the built servers: a training is seen through it.

Grafana is left out: it can't be built from Go modules, and no image is fetched.
"""

import json
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from support.backend_servers import own_ports
from support.podman import BUSYBOX, COMPOSE, need_podman
from support.prometheus_server import until
from support.server_binaries import built
from support.waiting_training import STEPS, held_training

from torchotel.stack import compose
from torchotel.stack.binaries import COLLECTOR, JAEGER, PROMETHEUS
from torchotel.stack.paths import shipped, targets

pytestmark = pytest.mark.real_server

SERVICES = ("collector", "jaeger", "prometheus")
UP_S = 120
"""podman-compose waits for ever for a container that died at once."""
IMAGES = Path(__file__).with_name("images")
"""Each has what the published one has too: its user, its folders, its entry."""
OPEN_FILES = ":".join(map(str, resource.getrlimit(resource.RLIMIT_NOFILE)))
HOST = f"""
[containers]
default_ulimits = ["nofile={OPEN_FILES}", "nproc=1024:1024"]
[engine]
cgroup_manager = "cgroupfs"
runtime = "runc"
"""
"""For a machine without systemd, on which limits can't be raised."""


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Give what `up` tells the compose file, with ports and folders of the test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return compose.variables(own_ports(), targets())


@pytest.fixture
def podman(told: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """Build the images and give the environment that podman needs."""
    need_podman()
    (tmp_path / "containers.conf").write_text(HOST)
    environ = {**os.environ, **told, "CONTAINERS_CONF": str(tmp_path / "containers.conf")}
    (tmp_path / "empty").mkdir()
    (tmp_path / "root" / "tmp").mkdir(parents=True)
    (tmp_path / "root" / "tmp").chmod(0o1777)
    for path in (built(COLLECTOR), built(JAEGER), built(PROMETHEUS), built(PROMETHEUS, "promtool"), BUSYBOX):
        shutil.copy(path, tmp_path)
    for name in SERVICES:
        call(environ, "podman", "build", "-q", "-t", image(name), "-f", str(IMAGES / name), str(tmp_path))
    return environ


def image(name: str) -> str:
    return f"localhost/torchotel-test-{name}:latest"


def call(environ: dict[str, str], *words: str) -> str:
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=UP_S, check=False)
    assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture
def _stack(podman: dict[str, str], tmp_path: Path) -> Iterator[None]:
    """Bring up all but Grafana; nothing is left at the end."""
    override = tmp_path / "images.yaml"
    override.write_text(json.dumps({"services": {name: {"image": image(name)} for name in SERVICES}}))
    compose = (str(COMPOSE), "-p", "torchotel-test", "-f", str(shipped() / "compose.yaml"), "-f", str(override))
    try:
        call(podman, *compose, "up", "-d", "--no-build", *SERVICES)
        yield
    finally:
        call(podman, *compose, "down", "--volumes")
        call(podman, "podman", "rmi", "-f", *map(image, SERVICES))


def ask(address: str) -> Any:
    with urlopen(f"http://127.0.0.1:{address}", timeout=10) as answer:
        return json.load(answer)


@pytest.mark.usefixtures("_stack")
def test_a_training_is_seen_through_the_compose_file(
    told: dict[str, str], podman: dict[str, str], tmp_path: Path
) -> None:
    """Its trace in Jaeger, by way of the Collector, and its series in Prometheus; and the health checks run."""
    jaeger, prometheus = (f"{told[name]}/api" for name in ("JAEGER_PORT", "PROMETHEUS_PORT"))
    until(lambda: ask(f"{jaeger}/services"), bool)
    endpoint = f"http://127.0.0.1:{told['OTLP_HTTP_PORT']}"
    variables = {"TORCHOTEL_DISCOVERY_DIR": told["TORCHOTEL_DISCOVERY_DIR"], "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
    with held_training(tmp_path, TORCHOTEL_DETAIL="all", **variables):
        query = f"{prometheus}/v1/query?query=torch_steps_total=={STEPS}"
        (steps,) = until(lambda: ask(query)["data"]["result"], bool)
        assert steps["metric"]["job"] == "digits"
    found = until(lambda: ask(f"{jaeger}/traces?service=digits&operation=torch.step")["data"] or [], bool)
    names = {span["operationName"] for span in found[0]["spans"]}
    assert {"torch.step", "torch.forward", "forward Linear", "torch.backward", "torch.optimizer.step"} <= names
    collector = f'{prometheus}/v1/query?query=up{{job="collector"}}==1'
    until(lambda: ask(collector)["data"]["result"], lambda found: len(found) == 2)
    with urlopen(f"http://127.0.0.1:{told['JAEGER_PORT']}/search", timeout=10) as page:
        assert f"//localhost:{told['GRAFANA_PORT']}/d/torchotel-layers" in page.read().decode()
    for name in ("jaeger", "prometheus"):
        call(podman, "podman", "healthcheck", "run", f"torchotel-test_{name}_1")
