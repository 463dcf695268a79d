"""The manifests: Kubernetes takes them, they fit each other, and no pod may do more than it must."""

import json
from importlib.metadata import version
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from support.kustomize import FOLDER, STACKS, WHOLE, Manifest, config, containers, manifests, of_kind, pods
from support.sizing_page import figures

MOST_BYTES = 262_144
"""Of a manifest that `kubectl apply` can remember in its annotation."""
OLDEST, NEWEST = "1.29", "1.37"


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("name", WHOLE)
def test_kubernetes_takes_it(name: str, version: str) -> None:
    """By its own schemas, with no field that it doesn't know and no kind that it doesn't bring."""
    for manifest in manifests(name):
        kubernetes_validate.validate(manifest, version, strict=True)
        assert len(json.dumps(manifest)) < MOST_BYTES


def test_a_misspelt_field_is_found() -> None:
    """So the claim above can fail."""
    manifest = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": {"selectors": {}}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, NEWEST, strict=True)


def ports(pod: Manifest) -> set[str]:
    return {port["name"] for container in pod["spec"]["containers"] for port in container.get("ports", [])}


@pytest.mark.parametrize("name", WHOLE)
def test_services_find_their_pods(name: str) -> None:
    for service in of_kind(name, "Service"):
        wanted = service["spec"]["selector"].items()
        (found,) = [pod for pod in pods(name).values() if wanted <= pod["metadata"]["labels"].items()]
        assert {port["targetPort"] for port in service["spec"].get("ports", [])} <= ports(found)


def config_maps(pod: Manifest) -> set[str]:
    volumes = pod["spec"].get("volumes", [])
    sources = [source for volume in volumes for source in (volume, *volume.get("projected", {}).get("sources", []))]
    return {source["configMap"]["name"] for source in sources if "configMap" in source}


@pytest.mark.parametrize("name", WHOLE)
def test_what_pods_need_is_there(name: str) -> None:
    """ConfigMaps, service accounts with their rights, and volumes for every mount."""
    there = {one["metadata"]["name"] for one in of_kind(name, "ConfigMap")}
    bound = {one["subjects"][0]["name"] for one in of_kind(name, "ClusterRoleBinding")}
    for pod in pods(name).values():
        assert config_maps(pod) <= there
        spec = pod["spec"]
        assert (spec.get("automountServiceAccountToken") is False) != (spec.get("serviceAccountName") in bound)
    for owner in of_kind(name, "StatefulSet", "DaemonSet", "Deployment", "Job"):
        spec = owner["spec"]["template"]["spec"]
        claims = [one["metadata"]["name"] for one in owner["spec"].get("volumeClaimTemplates", [])]
        volumes = {*claims, *(volume["name"] for volume in spec.get("volumes", []))}
        assert {mount["name"] for one in spec["containers"] for mount in one["volumeMounts"]} == volumes


@pytest.mark.parametrize("name", WHOLE)
def test_pods_may_do_no_more_than_they_must(name: str) -> None:
    """Pod Security's `restricted`, and a limit to their memory."""
    for pod, container in containers(name):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        own = container["securityContext"]
        assert own["allowPrivilegeEscalation"] is False
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert own.get("readOnlyRootFilesystem") or container["name"] == "opensearch"  # it writes beside its own data
        assert "memory" in container["resources"]["limits"]


def test_the_training_image_is_pinned() -> None:
    """With `latest`, pods of one Job could run different code."""
    ((_, container),) = containers("training")
    assert container["image"].rpartition(":")[2] == version("torchotel")


def test_versions_are_those_of_the_compose_file() -> None:
    """Where both have a server; the rest is pinned too."""
    composed = yaml.safe_load((FOLDER.parent / "compose.yaml").read_text())["services"].values()
    pinned = {repository: tag for repository, _, tag in (one["image"].rpartition(":") for one in composed)}
    images = [container["image"].rpartition(":") for _, container in containers("base")]
    assert len({repository for repository, _, _ in images} & pinned.keys()) == 3
    for repository, _, tag in images:
        assert tag[0] in "v0123456789"
        assert tag == pinned.get(repository, tag)


@pytest.mark.parametrize("name", STACKS)
def test_everything_is_in_its_namespace(name: str) -> None:
    for manifest in manifests(name):
        if manifest["kind"] not in {"Namespace", "ClusterRole", "ClusterRoleBinding"}:
            assert manifest["metadata"]["namespace"] == "torchotel"


def test_nobody_is_let_in_where_nothing_says_so() -> None:
    """Each pod has a policy of its own that names its ports, or none: then it takes no connection at all."""
    policies = {one["metadata"]["name"]: one["spec"] for one in of_kind("base", "NetworkPolicy")}
    assert policies.pop("default-deny") == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    assert policies.pop("dns")["policyTypes"] == policies.pop("opensearch-clients")["policyTypes"] == ["Egress"]
    assert policies.pop("metrics")["ingress"][0]["ports"] == [{"port": 8888}]
    served = {one["spec"]["selector"]["app.kubernetes.io/name"] for one in of_kind("base", "Service")}
    assert set(policies) == served
    for name, policy in policies.items():
        pod = pods("base")[name]
        own = {port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
        let_in = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
        assert policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        assert let_in == own - {8888}


def test_pods_connect_where_their_configurations_say_and_nowhere_else() -> None:
    """Each connection inside the namespace has a rule on both of its ends."""
    connections = {
        ("agent", "gateway", 4317),
        ("agent", "prometheus", 9090),
        ("gateway", "jaeger", 4317),
        ("jaeger", "opensearch", 9200),
        ("jaeger-cleaner", "opensearch", 9200),
    }
    leaving, arriving = set(), set()
    for policy in (one["spec"] for one in of_kind("base", "NetworkPolicy")):
        for rule in policy.get("egress", ()):
            leaving |= _connections(policy["podSelector"], rule, "to")
        for rule in policy.get("ingress", ()):
            arriving |= {(other, own, port) for own, other, port in _connections(policy["podSelector"], rule, "from")}
    assert leaving == connections
    assert arriving == connections


def _connections(selector: Manifest, rule: Manifest, way: str) -> set[tuple[str, str, int]]:
    selectors = [peer["podSelector"] for peer in rule.get(way, ()) if set(peer) == {"podSelector"}]
    others = [name for one in selectors for name in _names(one)]
    ports = [port["port"] for port in rule.get("ports", ())]
    return {(own, other, port) for own in _names(selector) for other in others for port in ports}


def _names(selector: Manifest) -> list[str]:
    """Give the names of the pods that a selector by label chooses; none for one that chooses all."""
    several = [one["values"] for one in selector.get("matchExpressions", ())]
    return [*selector.get("matchLabels", {}).values(), *(name for names in several for name in names)]


def stored_bytes(amount: str) -> float:
    return float(amount[:-2]) * {"Gi": 2**30, "Ti": 2**40, "GB": 1e9}[amount[-2:]]


def claimed_bytes(name: str, server: str) -> float:
    (found,) = [one for one in of_kind(name, "StatefulSet") if one["metadata"]["name"] == server]
    (claim,) = found["spec"]["volumeClaimTemplates"]
    return stored_bytes(claim["spec"]["resources"]["requests"]["storage"])


def test_opensearch_has_room_for_the_page_s_example() -> None:
    """64 ranks of which one step in 20 is stored, as the gateways do it, for as long as the cleaner leaves them."""
    (cleaner,) = [container for _, container in containers("base") if container["name"] == "cleaner"]
    run = next(run for run in figures()["RUNS"] if run.ranks == 64 and run.kept == 0.05)
    assert run.kept_days == int(cleaner["args"][0])
    assert run.volume_gb() * 1e9 <= claimed_bytes("base", "opensearch")


@pytest.mark.parametrize("name", STACKS)
def test_prometheus_uses_the_disk_that_it_has(name: str) -> None:
    """And leaves a tenth for its journal and what it merges."""
    (prometheus,) = [container for _, container in containers(name) if container["name"] == "prometheus"]
    (most,) = [word.partition("retention.size=")[2] for word in prometheus["args"] if "retention.size" in word]
    assert 0.8 <= stored_bytes(most) / claimed_bytes(name, "prometheus") <= 0.9


def test_remote_write_changes_nothing_else() -> None:
    """Its Prometheus is that of the base, and sends on what it has."""
    ours = yaml.safe_load(config("overlays/remote-write", "prometheus"))
    (sent,) = ours.pop("remote_write")
    assert ours == yaml.safe_load(config("base", "prometheus"))
    (prometheus,) = [
        container for _, container in containers("overlays/remote-write") if container["name"] == "prometheus"
    ]
    folders = {mount["mountPath"] for mount in prometheus["volumeMounts"]}
    assert {str(Path(file).parent) for file in sent["basic_auth"].values()} <= folders


def test_all_dashboards_and_alerts_come_along() -> None:
    """Grafana's chart finds the dashboards by their label, and the alerts that Grafana tells of by another."""
    grafana = FOLDER.parent / "grafana"
    for label, name, files in (
        ("grafana_dashboard", "grafana-{}", (grafana / "dashboards").glob("*.json")),
        ("grafana_alert", "grafana-{}-alerts", (grafana / "provisioning" / "alerting").glob("*.yaml")),
    ):
        labelled = [one for one in of_kind("base", "ConfigMap") if label in one["metadata"].get("labels", {})]
        found = {one["metadata"]["name"]: one["data"] for one in labelled}
        assert found == {name.format(file.stem): {file.name: file.read_text()} for file in files}
    rules = [file.read_text() for file in (FOLDER.parent / "prometheus" / "rules").glob("*.yaml")]
    assert [config("base", "prometheus-rules")] == rules
