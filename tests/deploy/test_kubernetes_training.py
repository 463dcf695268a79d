"""The training Job's program, run as its pods would run it: each rank a process with the Job's environment."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import PROGRAMS
from support.commands import environment
from support.kustomize import config, of_kind, with_targets
from support.otlp_http_receiver import Receiver
from support.ports import free_ports
from support.prometheus_server import Prometheus, prometheus_server, until
from support.server_binaries import built
from support.two_rank_run import alerts

from torchotel.stack.binaries import PROMETHEUS

RANKS = 2
CREATED = "batch.kubernetes.io"
UID = "5b1c44bc-6f37-4a5c-8f6c-0f2d6c1f3c11"


def job() -> Any:
    (found,) = of_kind("training", "Job")
    return found["spec"]


def in_pod(rank: int) -> dict[str, str]:
    """Give a container's environment as Kubernetes fills it in."""
    template = job()["template"]
    labels = {
        **template["metadata"]["labels"],
        f"{CREATED}/job-completion-index": str(rank),
        f"{CREATED}/controller-uid": UID,
    }
    fields = {f"metadata.labels['{name}']": value for name, value in labels.items()}
    fields |= {"metadata.uid": f"pod-{rank}"}
    told: dict[str, str] = {}
    for variable in template["spec"]["containers"][0]["env"]:
        text = variable.get("value") or fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        told[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda found: told[found[1]], text)
    return told


def test_each_pod_is_a_rank() -> None:
    """As many as the world has, the first one under the address that all of them ask for."""
    spec = job()
    (service,) = of_kind("training", "Service")
    told = in_pod(3)
    assert spec["completionMode"] == "Indexed"
    assert spec["parallelism"] == spec["completions"] == int(told["WORLD_SIZE"])
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert told["MASTER_ADDR"] == f"train-0.{service['metadata']['name']}"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert told["RANK"] == "3"


@pytest.mark.real_server
def test_a_rank_that_died_is_told_from_one_that_ended(server: Receiver, tmp_path: Path) -> None:
    """By the metrics that the Job's ranks push: a target in Kubernetes goes with its pod, however that ends."""
    built(PROMETHEUS)
    read = yaml.safe_dump(with_targets(config("base", "prometheus")))
    with ExitStack() as stack:
        prometheus = stack.enter_context(prometheus_server(read, tmp_path, "--web.enable-otlp-receiver"))
        ranks = [stack.enter_context(pushing(rank, server, prometheus, tmp_path)) for rank in range(RANKS)]
        until(lambda: prometheus.query("count(torch_run_finished == 0) == 2"), bool)
        (tmp_path / "end-0").write_text("normally")
        ranks[1].kill()
        until(lambda: prometheus.query("torch_run_finished == 1"), bool)
        died, later = alerts()["TorchRunDied"]["expr"], str(time.time() + 600)
        (found,) = prometheus.get("query", query=died, time=later)["result"]
    assert (found["metric"]["torch_run_id"], found["metric"]["torch_rank"]) == (UID, "1")


@contextmanager
def pushing(rank: int, server: Receiver, prometheus: Prometheus, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Train as a rank of the Job until a file says how it ends, and push past the agent, each second."""
    here = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": server.url.removesuffix("/v1/traces"),
        "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": f"{prometheus.url}otlp/v1/metrics",
        "OTEL_METRIC_EXPORT_INTERVAL": "1000",
    }
    command = [sys.executable, str(PROGRAMS / "rank_program.py"), str(folder / f"end-{rank}")]
    with subprocess.Popen(command, env=environment(**{**in_pod(rank), **here})) as process:
        try:
            yield process
        finally:
            process.kill()


def test_pushes_are_as_frequent_as_scrapes() -> None:
    """Which dashboards reckon with: their shortest windows are four of it."""
    told, read = in_pod(0), yaml.safe_load(config("base", "prometheus"))
    assert told["OTEL_METRICS_EXPORTER"] == "otlp"
    assert f"{int(told['OTEL_METRIC_EXPORT_INTERVAL']) // 1000}s" == read["global"]["scrape_interval"]
    assert not job()["template"]["metadata"].get("annotations")


def start(rank: int, program: Path, endpoint: str, port: int) -> "subprocess.Popen[str]":
    here = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_EXPORTER_PROMETHEUS_PORT": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(RANKS),
    }
    variables = environment(**{**in_pod(rank), **here})
    return subprocess.Popen([sys.executable, str(program)], env=variables, stderr=subprocess.PIPE, text=True)


@pytest.mark.program
def test_what_the_ranks_send_says_whose_it_is(server: Receiver, tmp_path: Path) -> None:
    """Service, run, rank and pod come from the Job; the first rank sends details, the others steps and phases."""
    pytest.importorskip("sklearn")
    program = tmp_path / "train.py"
    program.write_text(config("training", "train"))
    endpoint, (port,) = server.url.removesuffix("/v1/traces"), free_ports(1)
    ranks = [start(rank, program, endpoint, port) for rank in range(RANKS)]
    for process in ranks:
        _, said = process.communicate()
        assert process.returncode == 0, said
    seen: dict[tuple[object, ...], set[str]] = {}
    for request in server.requests:
        (resource,) = request.message.resource_spans
        told = {one.key: one.value.string_value or one.value.int_value for one in resource.resource.attributes}
        who = tuple(told[name] for name in ("service.name", "torch.run.id", "torch.rank", "k8s.pod.uid"))
        seen.setdefault(who, set()).update(span.name for span in request.spans())
    first, second = ("train", UID, 0, "pod-0"), ("train", UID, 1, "pod-1")
    assert seen.keys() == {first, second}
    assert "forward module.0" in seen[first] or "forward 0" in seen[first]
    assert not any(name.startswith(("forward ", "backward ")) for name in seen[second])
    assert "torch.optimizer.step" in seen[second]
