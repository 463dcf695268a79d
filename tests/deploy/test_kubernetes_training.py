"""The training Job's program, run as its pods would run it: each rank a process with the Job's environment."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import environment
from kustomized import config, of_kind
from loopback import free_ports
from receiver import Receiver

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
    fields |= {"status.podIP": "127.0.0.1", "metadata.uid": f"pod-{rank}"}
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
