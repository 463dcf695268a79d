"""What `kubectl apply -k` would send to a cluster."""

import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from support.server_binaries import tool
from tools.backends import module_builder
from torchotel.stack.binaries import Backend

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
KUSTOMIZE = Backend("kustomize", "5.8.1", ("kustomize",))
BUILD_KUSTOMIZE = module_builder("sigs.k8s.io/kustomize/kustomize/v5", "v5.8.1", {"kustomize": "."})
STACKS = ("base", "overlays/remote-write", "overlays/large")
WHOLE = (*STACKS, "training")
Manifest = dict[str, Any]


@cache
def manifests(name: str) -> tuple[Manifest, ...]:
    """Build one of the folders that have a kustomization."""
    command = [str(tool(KUSTOMIZE, BUILD_KUSTOMIZE)), "build", str(FOLDER / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def of_kind(name: str, *kinds: str) -> list[Manifest]:
    return [one for one in manifests(name) if one["kind"] in kinds]


def pods(name: str) -> dict[str, Manifest]:
    """Give the templates of pods, by the names of what makes them."""
    return {one["metadata"]["name"]: template for one in manifests(name) if (template := _template(one))}


def _template(manifest: Manifest) -> Manifest | None:
    spec = manifest.get("spec", {})
    found: Manifest | None = spec.get("jobTemplate", {}).get("spec", spec).get("template")
    return found


def containers(name: str) -> Iterator[tuple[Manifest, Manifest]]:
    """Give every container with the pod that it is in."""
    for pod in pods(name).values():
        for container in pod["spec"]["containers"]:
            yield pod["spec"], container


def config(name: str, of: str) -> str:
    """Give the one file of a ConfigMap; their names end in a hash, but for Grafana's."""
    (found,) = [one for one in of_kind(name, "ConfigMap") if one["metadata"]["name"].rpartition("-")[0] == of]
    (text,) = found["data"].values()
    return str(text)


def with_targets(text: str, *found: Any) -> Any:
    """Give Prometheus's configuration with pods from a file: it is built without the client of Kubernetes."""
    read = yaml.safe_load(text)
    (job,) = read["scrape_configs"]
    assert job.pop("kubernetes_sd_configs") == [{"role": "pod"}]
    job["file_sd_configs"] = list(found)
    return read
