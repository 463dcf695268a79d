"""One training, scraped and pushed at once: what a real Prometheus has of it is the same, whichever way it came."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import pytest
from support.backend_servers import collector, jaeger, own_ports, prometheus, running
from support.jaeger_traces import JaegerApi
from support.metrics_training import SEEN, train
from support.prometheus_server import Prometheus, until
from support.scraped_metrics import Series

import torchotel
from torchotel._handle import Handle

pytestmark = pytest.mark.real_server

WITH_COLLECTOR = "through the Collector"
WAYS = (WITH_COLLECTOR, "into Prometheus")
"""How metrics are pushed: as with `compose.desktop.yaml`, and with `compose.small.yaml`, which has no Collector."""
JOB = "digits"
NOT_IN_TARGET = {"service_name", "service_instance_id"}
"""A conversion of OTLP makes `job` and `instance` of them, and leaves them out of `target_info`."""


class Stack(NamedTuple):
    """Where a training finds the servers, and who reads them."""

    variables: dict[str, str]
    prometheus: Prometheus
    jaeger: JaegerApi
    le: Callable[[str], str]
    """How the buckets of a scrape are labelled where metrics are pushed."""


@pytest.fixture(params=WAYS)
def stack(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stack]:
    """Run the servers; without the Collector nothing can come through it."""
    ports, through = own_ports(), request.param == WITH_COLLECTOR
    variables = {
        "TORCHOTEL_DISCOVERY_DIR": str(tmp_path / "targets"),
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://localhost:{ports.otlp_http if through else ports.jaeger_otlp_http}",
    }
    with ExitStack() as up:
        up.enter_context(running(jaeger(tmp_path / "jaeger", ports, memory=True)))
        up.enter_context(running(prometheus(tmp_path / "prometheus", tmp_path / "targets", ports)))
        if through:
            up.enter_context(running(collector(tmp_path / "collector", ports)))
        else:
            receiver = f"http://localhost:{ports.prometheus}/api/v1/otlp/v1/metrics"
            variables["OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"] = receiver
        yield Stack(variables, Prometheus(ports.prometheus), JaegerApi(ports.jaeger), str if through else plainly)


def plainly(le: str) -> str:
    """Write a bound as Prometheus's receiver does, and no scrape: 0.00005, not 5e-05, and 2, not 2.0."""
    return le if le == "+Inf" else format(Decimal(le).normalize(), "f")


@pytest.fixture
def handle(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> Handle:
    """Train, and send all of it."""
    for name, text in stack.variables.items():
        monkeypatch.setenv(name, text)
    handle = torchotel.instrument(
        service_name=JOB, metrics_exporter="prometheus,otlp", module_histograms=True, gradient_norms=True, detail=2
    )
    train()
    assert handle.flush()
    return handle


def instances(handle: Handle, stack: Stack) -> tuple[str, str]:
    """Give the names of the training where it was scraped and where it was pushed, once there are both."""
    steps = until(lambda: stack.prometheus.query("torch_steps_total"), lambda found: len(found) == 2)
    scraped = f"127.0.0.1:{handle.prometheus_port}"
    (pushed,) = {one["metric"]["instance"] for one in steps} - {scraped}
    return scraped, pushed


def settle(handle: Handle, stack: Stack) -> None:
    """Wait until Prometheus has heard both ways of the last count: that of what arrived."""
    assert handle.flush()
    counted_s = time.time()

    def times_s() -> list[float]:
        assert handle.flush()  # it pushes
        return [float(one["value"][1]) for one in stack.prometheus.query("timestamp(torch_steps_total)")]

    until(times_s, lambda found: len(found) == 2 and min(found) > counted_s)


def series(server: Prometheus, instance: str, le: Callable[[str], str] = str) -> Series:
    """Give all that an instance says, without its name, the bounds of buckets written anew."""
    found: Series = {}
    for one in server.query(f'{{instance="{instance}", __name__=~"torch.*"}}'):
        labels = {name: text for name, text in one["metric"].items() if name not in {"__name__", "instance"}}
        labels |= {"le": le(labels["le"])} if "le" in labels else {}
        found[one["metric"]["__name__"], frozenset(labels.items())] = float(one["value"][1])
    return found


def exemplars(server: Prometheus, instance: str) -> set[tuple[str, str]]:
    """Give the traces and spans that the exemplars of an instance name."""
    now_s = time.time()
    span = {"start": str(now_s - 600), "end": str(now_s + 600)}
    found = server.get("query_exemplars", query=f'torch_step_duration_seconds_bucket{{instance="{instance}"}}', **span)
    labels = [one["labels"] for entry in found for one in entry["exemplars"]]
    return {(one["trace_id"], one["span_id"]) for one in labels}


def target(server: Prometheus, instance: str) -> dict[str, str]:
    """Give the resource, as series are joined with it."""
    (found,) = server.query(f'target_info{{instance="{instance}"}}')
    return {name: text for name, text in found["metric"].items() if name != "instance"}


def test_what_is_pushed_is_what_is_scraped(handle: Handle, stack: Stack) -> None:
    """Every series with its name, labels and value; only `instance` is the process's id and not its address."""
    settle(handle, stack)
    scraped, pushed = instances(handle, stack)
    expected = series(stack.prometheus, scraped, stack.le)
    assert {name for name, _ in expected} == set(SEEN)
    assert {dict(labels)["job"] for _, labels in expected} == {JOB}
    assert series(stack.prometheus, pushed) == expected
    about = target(stack.prometheus, scraped)
    assert (about["service_name"], about["service_instance_id"]) == (JOB, pushed)
    assert target(stack.prometheus, pushed) == {name: text for name, text in about.items() if name not in NOT_IN_TARGET}


def test_buckets_add_up_over_both_ways(handle: Handle, stack: Stack) -> None:
    """However their bounds are written: the same values counted twice have the same quantiles."""
    settle(handle, stack)
    scraped, _ = instances(handle, stack)
    for quantile in (0.1, 0.5, 0.9):
        ask = f"histogram_quantile({quantile}, sum by (le) (torch_module_duration_seconds_bucket%s))"
        (alone,) = stack.prometheus.query(ask % f'{{instance="{scraped}"}}')
        (both,) = stack.prometheus.query(ask % "")
        assert both["value"][1] == alone["value"][1]


def test_exemplars_lead_to_steps_in_jaeger(handle: Handle, stack: Stack) -> None:
    """Scraped or pushed: Jaeger has the trace that one names, and in it the step."""
    scraped, pushed = instances(handle, stack)
    named = until(lambda: exemplars(stack.prometheus, scraped), bool)
    named |= until(lambda: exemplars(stack.prometheus, pushed), bool)
    ids = {span for _, span in named}
    spans = until(lambda: stack.jaeger.spans(trace for trace, _ in named), lambda there: ids <= there.keys())
    assert named == {(spans[span].trace_id, span) for span in ids}
    assert {spans[span].name for span in ids} == {"torch.step"}
