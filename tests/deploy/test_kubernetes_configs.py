"""The configurations that the cluster's servers read, taken and run by the real servers."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import NonRecordingSpan, SpanContext, StatusCode, set_span_in_context
from support.kustomize import STACKS, config, of_kind, with_targets
from support.otlp_grpc_receiver import GrpcReceiver, grpc_receiver
from support.ports import free_ports
from support.prometheus_server import prometheus_server, until
from support.server_binaries import built

from torchotel.stack.binaries import COLLECTOR, JAEGER, PROMETHEUS

DEPLOY = Path(__file__).parents[2] / "deploy"


def check(*command: str, **variables: str) -> None:
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def saved(folder: Path, text: str) -> str:
    file = folder / "config.yaml"
    file.write_text(text)
    return str(file)


def balancing_one() -> Any:
    """Give the agent's configuration with the parts of the one exporter that can't be had here as exporters of OTLP."""
    read = yaml.safe_load(config("base", "agent"))
    balancer = read["exporters"].pop("load_balancing")
    assert balancer["routing_key"] == "traceID"
    to_one = {**balancer["protocol"]["otlp"], "endpoint": "gateway-headless:4317"}
    common = {name: balancer[name] for name in ("retry_on_failure", "sending_queue")}
    parts = {"otlp_grpc/one": to_one, "otlp_grpc/all": {**to_one, **common}}
    read["exporters"] |= parts
    read["service"]["pipelines"]["traces"]["exporters"] = [*parts]
    return read


@pytest.mark.real_server
def test_the_collector_takes_the_agent_s(tmp_path: Path) -> None:
    """All of it but the load balancing."""
    collector = str(built(COLLECTOR))
    check(collector, "validate", "--config", saved(tmp_path, yaml.safe_dump(balancing_one())), NODE_NAME="node-1")


def test_what_a_gateway_does_not_take_goes_to_another() -> None:
    """The one queue stands before the choice of a gateway; spans in one behind it would be lost with that gateway."""
    balancer = yaml.safe_load(config("base", "agent"))["exporters"]["load_balancing"]
    assert balancer["sending_queue"]["queue_size"] > 0
    own = balancer["protocol"]["otlp"]
    assert own["retry_on_failure"] == own["sending_queue"] == {"enabled": False}


@pytest.mark.real_server
def test_the_collector_takes_the_gateway_s(tmp_path: Path) -> None:
    collector = str(built(COLLECTOR))
    file = saved(tmp_path, config("base", "gateway"))
    check(collector, "validate", "--config", file, COLLECTOR_STORAGE=str(tmp_path))


@pytest.mark.real_server
def test_jaeger_takes_its_own(tmp_path: Path) -> None:
    check(str(built(JAEGER)), "validate", "--config", saved(tmp_path, config("base", "jaeger")))


@pytest.mark.real_server
@pytest.mark.parametrize("name", STACKS)
def test_prometheus_takes_its_own(name: str, tmp_path: Path) -> None:
    """All of it but where it finds pods."""
    promtool = str(built(PROMETHEUS, "promtool"))
    read = with_targets(config(name, "prometheus"), {"files": ["pods.json"]})
    check(promtool, "check", "config", "--syntax-only", saved(tmp_path, yaml.safe_dump(read)))


def pod(
    name: str, port: str = "metrics", phase: str = "Running", scrape: str = "true", namespace: str = "research"
) -> dict[str, Any]:
    """Give a pod as Kubernetes describes it to Prometheus, a target for each of its ports."""
    labels = {
        "namespace": namespace,
        "pod_name": name,
        "pod_node_name": "node-1",
        "pod_phase": phase,
        "pod_container_port_name": port,
        "pod_container_port_number": "9464",
        "pod_annotation_prometheus_io_scrape": scrape,
        "pod_label_app_kubernetes_io_name": "train",
    }
    described = {f"__meta_kubernetes_{key}": value for key, value in labels.items()}
    return {"targets": [f"192.0.2.1:{len(name)}"], "labels": described}


@pytest.mark.real_server
def test_prometheus_scrapes_running_ranks_under_the_names_that_dashboards_know(tmp_path: Path) -> None:
    """A rank's job is its service, its instance its pod, of which another namespace may have one of the same name.

    The other ports, and pods that ended, are left alone.
    """
    built(PROMETHEUS)
    pods = [pod("train-0-x"), pod("train-1-xx", port="http"), pod("train-2-xxx", phase="Succeeded")]
    pods += [pod("other-pod-xxxx", scrape=""), pod("train-0-x", namespace="teaching")]
    (tmp_path / "pods.json").write_text(json.dumps(pods))
    read = with_targets(config("base", "prometheus"), {"files": [str(tmp_path / "pods.json")]})
    with prometheus_server(yaml.safe_dump(read), tmp_path) as prometheus:
        found = until(lambda: prometheus.get("targets"), lambda targets: len(targets["activeTargets"]) > 1)
    labels = [target["labels"] for target in found["activeTargets"]]
    assert sorted(labels, key=lambda one: str(one["namespace"])) == [
        {"job": "train", "instance": f"{namespace}/train-0-x:9464", "namespace": namespace, "node": "node-1"}
        for namespace in ("research", "teaching")
    ]


class Sender:
    """Steps as ranks send them, each span in a request of its own."""

    def __init__(self, endpoint: str) -> None:
        self._provider = TracerProvider()
        self._provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint, insecure=True)))
        self._tracer = self._provider.get_tracer("ranks")

    def step(self, name: str, *, reason: str = "sampled", failed: bool = False) -> SpanContext:
        with self._tracer.start_as_current_span(name, attributes={"torch.kept.reason": reason}) as span:
            self._tracer.start_span("torch.forward").end()
            if failed:
                span.set_status(StatusCode.ERROR)
        return span.get_span_context()

    def late(self, name: str, step: SpanContext) -> None:
        self._tracer.start_span(name, set_span_in_context(NonRecordingSpan(step))).end()

    def close(self) -> None:
        self._provider.shutdown()


@contextmanager
def gateway(folder: Path) -> Iterator[tuple[Sender, GrpcReceiver]]:
    """Run a Collector with the gateway's configuration between a sender and a receiver."""
    otlp, health, telemetry = free_ports(3)
    with ExitStack() as stack:
        jaeger = stack.enter_context(grpc_receiver())
        settings = {
            "COLLECTOR_LISTEN_HOST": "127.0.0.1",
            "OTLP_GRPC_PORT": str(otlp),
            "COLLECTOR_HEALTH_PORT": str(health),
            "COLLECTOR_TELEMETRY_PORT": str(telemetry),
            "COLLECTOR_STORAGE": str(folder / "queue"),
            "JAEGER_OTLP_ENDPOINT": f"127.0.0.1:{jaeger.port}",
            "DECISION_WAIT": "1s",
            "KEPT_PERCENT": "0",
        }
        command = [str(built(COLLECTOR)), "--config", saved(folder, config("base", "gateway"))]
        process = stack.enter_context(subprocess.Popen(command, env=settings, stderr=subprocess.DEVNULL))
        stack.callback(process.terminate)
        sender = Sender(f"127.0.0.1:{otlp}")
        stack.callback(sender.close)
        yield sender, jaeger


def stored(jaeger: GrpcReceiver, spans: int) -> list[Span]:
    return until(lambda: list(jaeger.spans), lambda there: len(there) >= spans)


@pytest.mark.real_server
def test_a_gateway_stores_what_training_kept(tmp_path: Path) -> None:
    """And what failed and the run's one span, whole; of the rest a share, here none."""
    with gateway(tmp_path) as (sender, jaeger):
        dropped = sender.step("ordinary")
        kept = [sender.step(reason, reason=reason) for reason in ("slow", "error", "nan", "first")]
        kept += [sender.step("failed", failed=True), sender.step("torch.run")]
        spans = stored(jaeger, 2 * len(kept))
        assert {span.trace_id for span in spans} == {step.trace_id.to_bytes(16) for step in kept}
        # The ordinary step came first, so it has been decided on too.
        sender.late("late, dropped", dropped)
        sender.late("late, kept", kept[0])
        last = sender.step("last", reason="slow")
        spans = stored(jaeger, 2 * len(kept) + 3)
    after = [span for span in spans if span.name.startswith("late") or span.trace_id == last.trace_id.to_bytes(16)]
    assert sorted(span.name for span in after) == ["last", "late, kept", "torch.forward"]


def test_an_agent_waits_until_it_knows_its_pods() -> None:
    """Else the first pushes after its start would lack the labels that the next ones have."""
    assert yaml.safe_load(config("base", "agent"))["processors"]["k8s_attributes"]["wait_for_metadata"] is True


def test_no_policy_looks_at_a_trace_s_length() -> None:
    """The rank decides which steps were slow, by its own earlier steps."""
    policies = yaml.safe_load(config("base", "gateway"))["processors"]["tail_sampling"]["policies"]
    assert {policy["type"] for policy in policies} == {
        "string_attribute",
        "status_code",
        "ottl_condition",
        "probabilistic",
    }


@pytest.mark.parametrize("file", ["jaeger/jaeger.yaml", "kubernetes/base/config/jaeger.yaml"])
def test_jaeger_corrects_clock_skew(file: str) -> None:
    """Each trace comes from one rank, so the correction shifts no rank's spans against another rank's."""
    read = yaml.safe_load((DEPLOY / file).read_text())
    assert "max_clock_skew_adjust" not in read["extensions"]["jaeger_query"]


def test_servers_are_called_by_the_names_of_their_services() -> None:
    """Each host that a configuration names, and the port."""
    served = {
        f"{one['metadata']['name']}:{port['port']}"
        for one in of_kind("base", "Service")
        for port in one["spec"]["ports"]
    }
    agent, gateways = yaml.safe_load(config("base", "agent")), config("base", "gateway")
    resolved = agent["exporters"]["load_balancing"]["resolver"]["dns"]
    assert f"{resolved['hostname']}:{resolved['port']}" in served
    assert agent["exporters"]["otlp_http/prometheus"]["endpoint"].split("/")[2] in served
    assert "dns:///jaeger-otlp:4317" in gateways
    assert "jaeger-otlp:4317" in served
    assert "http://opensearch:9200" in config("base", "jaeger")
    assert "opensearch:9200" in served
