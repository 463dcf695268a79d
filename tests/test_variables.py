"""Every variable of the specification is set, and does what the table of `torchotel/_variables.py` says of it."""

import ast
import dataclasses
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import commands
import pytest
import torch
from grpc_receiver import GrpcReceiver, grpc_receiver
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from receiver import Answer, Receiver
from support import plain
from tls_receiver import Authority, served

import torchotel
from torchotel._config import Config
from torchotel._stats import Stats
from torchotel._variables import VARIABLES, Variable

PACKAGE = Path(torchotel.__file__).parent
PROVEN: list[str] = []
OTLP = "OTEL_EXPORTER_OTLP_"
SIGNALS = ("", "TRACES_", "METRICS_")

Test = Callable[..., None]


def proves(*names: str) -> Callable[[Test], Test]:
    """Run a test once for each of some variables."""
    PROVEN.extend(names)
    return pytest.mark.parametrize("variable", names)


def proves_option(option: str) -> Callable[[Test], Test]:
    """Run a test for an option of the exporter in its general form, and in those of the signals that we send."""
    return proves(*(f"{OTLP}{signal}{option}" for signal in SIGNALS))


class Program:
    """A program of one step, under the variables that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, server: Receiver) -> None:
        self._monkeypatch, self.server = monkeypatch, server
        self.base = server.url.removesuffix("/v1/traces")
        self._pushed_before = 0

    def run(self, environ: dict[str, str], *, flush_s: float = 5.0) -> Stats:
        """Train a step; both signals go to the receiver over OTLP where `environ` says nothing else."""
        defaults = {f"{OTLP}ENDPOINT": self.base, "OTEL_METRICS_EXPORTER": "otlp"}
        self._pushed_before = len(self.server.pushed)
        with self._monkeypatch.context() as patch:
            for name, text in {**defaults, **environ}.items():
                patch.setenv(name, text)
            handle = torchotel.instrument()
            with torchotel.step(epoch=1):
                loss = torch.nn.Linear(4, 4)(torch.rand(2, 4)).sum()
                loss.backward()
                torchotel.log(loss=loss, note="abcdef")
            handle.flush(flush_s)
            handle.shutdown(1)
        return handle.stats()

    def span(self, name: str = "torch.step") -> Span:
        return next(span for span in self.server.spans if span.name == name)

    def metric(self, name: str) -> Metric:
        """Give a metric of the last run's first push: later ones hold what has changed where they hold differences."""
        pushed = self.server.pushed[self._pushed_before :]
        return next(metric for one in pushed for metric in _metrics(one.message) if metric.name == name)

    def resource(self) -> dict[str, Any]:
        resource = self.server.requests[-1].message.resource_spans[0].resource
        return {pair.key: plain(pair.value) for pair in resource.attributes}


def _metrics(message: Any) -> Iterable[Metric]:
    return (m for resource in message.resource_metrics for scope in resource.scope_metrics for m in scope.metrics)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, server: Receiver) -> Program:
    return Program(monkeypatch, server)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


def only(variable: str) -> dict[str, str]:
    """Turn off the signal that a variable is not for."""
    if "_TRACES_" in variable:
        return {"OTEL_METRICS_EXPORTER": "none"}
    return {"OTEL_TRACES_EXPORTER": "none"} if "_METRICS_" in variable else {}


def arrived(stats: Stats, variable: str) -> bool:
    """Tell whether what a variable is for came out."""
    traces = "_METRICS_" in variable or stats["spans_exported"] > 0
    return traces and stats["export_errors"] == 0


# The exporter of OTLP.


@proves(f"{OTLP}ENDPOINT")
def test_endpoint_is_a_base(variable: str, program: Program) -> None:
    program.run({variable: f"{program.base}/"})
    assert program.server.requests[0].path == "/v1/traces"
    assert program.server.pushed


@proves(f"{OTLP}TRACES_ENDPOINT")
def test_endpoint_of_traces_is_verbatim(variable: str, program: Program) -> None:
    program.run({variable: f"{program.base}/own?key=1", **only(variable)})
    assert program.server.requests[0].path == "/own?key=1"


@proves(f"{OTLP}METRICS_ENDPOINT")
def test_endpoint_of_metrics_is_verbatim(variable: str, program: Program) -> None:
    nowhere = {f"{OTLP}ENDPOINT": "http://127.0.0.1:9", **only(variable)}
    program.run({variable: f"{program.base}/v1/metrics", **nowhere})
    assert program.server.pushed


@proves_option("PROTOCOL")
def test_protocol(variable: str, program: Program) -> None:
    with grpc_receiver() as peer:
        program.run({variable: "grpc", f"{OTLP}ENDPOINT": peer.endpoint, **only(variable)})
        assert _came(peer) == ("_METRICS_" not in variable, "_TRACES_" not in variable)


def _came(peer: GrpcReceiver) -> tuple[bool, bool]:
    return bool(peer.spans), bool(peer.pushed)


@proves_option("INSECURE")
def test_insecure(variable: str, program: Program) -> None:
    with grpc_receiver() as peer:
        target = peer.endpoint.removeprefix("http://")
        environ = {f"{OTLP}PROTOCOL": "grpc", f"{OTLP}ENDPOINT": target, **only(variable)}
        program.run({variable: "true", **environ})
        assert _came(peer) == ("_METRICS_" not in variable, "_TRACES_" not in variable)
        assert not arrived(program.run(environ, flush_s=0.3), variable)


@proves_option("HEADERS")
def test_headers(variable: str, program: Program) -> None:
    program.run({variable: "x-key=a%20b"})
    traces = program.server.requests[-1].headers.get("x-key")
    metrics = program.server.pushed[-1].headers.get("x-key")
    assert traces == (None if "_METRICS_" in variable else "a b")
    assert metrics == (None if "_TRACES_" in variable else "a b")


@proves_option("COMPRESSION")
def test_compression(variable: str, program: Program) -> None:
    program.run({variable: "none"})
    traces = program.server.requests[-1].headers.get("Content-Encoding")
    metrics = program.server.pushed[-1].headers.get("Content-Encoding")
    assert traces == ("gzip" if "_METRICS_" in variable else None)
    assert metrics == ("gzip" if "_TRACES_" in variable else None)


@proves_option("TIMEOUT")
def test_timeout(variable: str, program: Program) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environ = {f"{OTLP}ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}", **only(variable)}
        assert program.run({variable: "0.1", **environ}, flush_s=1.0)["export_errors"] > 0
    config = Config.read({}, {variable: "0.1"})
    assert (config.timeout_s == 0.1, config.metrics_timeout_s == 0.1) == (
        "_METRICS_" not in variable,
        "_TRACES_" not in variable,
    )


@proves_option("CERTIFICATE")
def test_certificate(variable: str, program: Program, authority: Authority) -> None:
    with served(authority, "http/protobuf", mutual=False) as endpoint:
        environ = {f"{OTLP}ENDPOINT": endpoint.removesuffix("/v1/traces"), **only(variable)}
        assert arrived(program.run({variable: authority.files.authority, **environ}), variable)
        assert not arrived(program.run(environ, flush_s=0.3), variable)


@proves_option("CLIENT_CERTIFICATE")
def test_client_certificate(variable: str, program: Program, authority: Authority) -> None:
    with served(authority, "http/protobuf", mutual=True) as endpoint:
        environ = {
            f"{OTLP}ENDPOINT": endpoint.removesuffix("/v1/traces"),
            f"{OTLP}CERTIFICATE": authority.files.authority,
            **only(variable),
        }
        assert arrived(program.run({variable: authority.files.client_both, **environ}), variable)
        assert not arrived(program.run(environ, flush_s=0.3), variable)


@proves_option("CLIENT_KEY")
def test_client_key(variable: str, program: Program, authority: Authority) -> None:
    with served(authority, "http/protobuf", mutual=True) as endpoint:
        environ = {
            f"{OTLP}ENDPOINT": endpoint.removesuffix("/v1/traces"),
            f"{OTLP}CERTIFICATE": authority.files.authority,
            f"{OTLP}CLIENT_CERTIFICATE": authority.files.client,
            **only(variable),
        }
        assert arrived(program.run({variable: authority.files.client_key, **environ}), variable)
        assert not arrived(program.run(environ, flush_s=0.3), variable)


@proves(f"{OTLP}METRICS_TEMPORALITY_PREFERENCE")
@pytest.mark.parametrize(
    ("text", "counters", "histograms"),
    [("cumulative", "CUMULATIVE", "CUMULATIVE"), ("DELTA", "DELTA", "DELTA"), ("lowmemory", "CUMULATIVE", "DELTA")],
)
def test_temporality(variable: str, text: str, counters: str, histograms: str, program: Program) -> None:
    program.run({variable: text})
    said: list[Any] = [program.metric("torch.steps").sum, program.metric("torch.step.duration").histogram]
    names = [AggregationTemporality.Name(one.aggregation_temporality) for one in said]
    assert names == [f"AGGREGATION_TEMPORALITY_{name}" for name in (counters, histograms)]


@proves(f"{OTLP}METRICS_DEFAULT_HISTOGRAM_AGGREGATION")
def test_histogram_aggregation(variable: str, program: Program) -> None:
    program.run({})
    assert program.metric("torch.step.duration").WhichOneof("data") == "histogram"
    assert 0.5 in program.metric("torch.step.duration").histogram.data_points[0].explicit_bounds
    program.run({variable: "base2_exponential_bucket_histogram"})
    assert program.metric("torch.step.duration").WhichOneof("data") == "exponential_histogram"


# General.


@proves("OTEL_SDK_DISABLED")
def test_disabled(variable: str, program: Program) -> None:
    assert program.run({variable: "true"})["steps"] == 0
    assert not program.server.requests
    assert not program.server.pushed


@proves("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES")
def test_resource(variable: str, program: Program) -> None:
    text = "service.name=mine%2C%20too,team=vision" if variable.endswith("ATTRIBUTES") else "mine, too"
    program.run({variable: text})
    assert program.resource()["service.name"] == "mine, too"
    assert program.resource().get("team") == ("vision" if "team" in text else None)


@proves("OTEL_EXPERIMENTAL_RESOURCE_DETECTORS")
def test_resource_detectors(variable: str, program: Program) -> None:
    program.run({})
    assert "os.type" not in program.resource()
    program.run({variable: "os"})
    assert program.resource()["os.type"]


@proves("OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG")
def test_sampler(variable: str, program: Program) -> None:
    sampler = "always_off" if variable.endswith("SAMPLER") else "traceidratio"
    assert program.run({"OTEL_TRACES_SAMPLER": sampler, "OTEL_TRACES_SAMPLER_ARG": "0"})["spans_sampled_out"]
    assert {span.name for span in program.server.spans} <= {"torch.run"}


@proves("OTEL_TRACES_EXPORTER")
@pytest.mark.parametrize("text", ["otlp", "console", "none"])
def test_traces_exporter(variable: str, text: str, program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    program.run({variable: text})
    assert bool(program.server.requests) == (text == "otlp")
    assert ("torch.step" in capsys.readouterr().out) == (text == "console")


@proves("OTEL_METRICS_EXPORTER")
@pytest.mark.parametrize("text", ["otlp", "prometheus", "none"])
def test_metrics_exporter(variable: str, text: str, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    program.run({variable: text})
    assert bool(program.server.pushed) == (text == "otlp")
    monkeypatch.setenv(variable, text)
    with torchotel.instrument(traces_exporter="none") as handle:
        assert (handle.prometheus_port is not None) == (text == "prometheus")


# Limits.


@proves("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "OTEL_ATTRIBUTE_COUNT_LIMIT")
def test_attribute_count(variable: str, program: Program) -> None:
    program.run({variable: "2"})
    span = program.span()
    assert len(span.attributes) == 2
    assert span.dropped_attributes_count > 0


@proves("OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT")
def test_attribute_length(variable: str, program: Program) -> None:
    program.run({variable: "3"})
    assert {pair.key: plain(pair.value) for pair in program.span().attributes}["torch.log.note"] == "abc"


class Limited(NamedTuple):
    """What a failing forward is left with."""

    events: int
    event_attributes: set[int]
    links: int
    link_attributes: set[int]


def limited(program: Program, environ: dict[str, str]) -> Limited:
    """Run a program, and count what its spans carry; steps link to `torch.run`, and `watch` makes an event."""
    with pytest.MonkeyPatch.context() as patch:
        for name, text in {f"{OTLP}ENDPOINT": program.base, "OTEL_METRICS_EXPORTER": "none", **environ}.items():
            patch.setenv(name, text)
        with torchotel.instrument(detail="all"), torchotel.step():
            hidden = torch.nn.Linear(4, 4)(torch.rand(2, 4))
            torchotel.watch(hidden, "hidden")
            hidden.sum().backward()
    events = [event for span in program.server.spans for event in span.events]
    links = [link for span in program.server.spans for link in span.links]
    return Limited(
        len(events),
        {len(event.attributes) for event in events},
        len(links),
        {len(link.attributes) for link in links},
    )


@proves("OTEL_SPAN_EVENT_COUNT_LIMIT")
def test_event_count(variable: str, program: Program) -> None:
    assert limited(program, {variable: "0"}).events == 0


@proves("OTEL_SPAN_LINK_COUNT_LIMIT")
def test_link_count(variable: str, program: Program) -> None:
    assert limited(program, {variable: "0"}).links == 0


@proves("OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT")
def test_event_attribute_count(variable: str, program: Program) -> None:
    found = limited(program, {variable: "1"})
    assert (found.events > 0, found.event_attributes) == (True, {1})


@proves("OTEL_LINK_ATTRIBUTE_COUNT_LIMIT")
def test_link_attribute_count(variable: str, program: Program) -> None:
    found = limited(program, {variable: "0"})
    assert (found.links > 0, found.link_attributes) == (True, {0})


# Metrics.


@proves("OTEL_METRIC_EXPORT_INTERVAL")
def test_export_interval(variable: str, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "50")
    with torchotel.instrument(endpoint=program.base, metrics_exporter="otlp", traces_exporter="none"):
        assert len(program.server.wait_for_pushed(3)) >= 3


@proves("OTEL_METRIC_EXPORT_TIMEOUT")
def test_export_timeout(variable: str, program: Program) -> None:
    """The flush's push is refused once, and tried again where there is time for that; the end has a push of its own."""
    for environ, requests in (({variable: "100"}, 2), ({}, 3)):
        program.server.pushed.clear()
        program.server.push_answers.append(Answer(503))
        assert program.run(environ)["export_errors"] == 1
        assert len(program.server.pushed) == requests


@proves("OTEL_METRICS_EXEMPLAR_FILTER")
def test_exemplar_filter(variable: str, program: Program) -> None:
    assert program.run({})["spans_exported"]
    assert program.metric("torch.step.duration").histogram.data_points[0].exemplars
    program.run({variable: "always_off"})
    assert not program.metric("torch.step.duration").histogram.data_points[0].exemplars


@proves("OTEL_EXPORTER_PROMETHEUS_PORT", "OTEL_EXPORTER_PROMETHEUS_HOST")
def test_prometheus(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_PORT", str(port))
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_HOST", "127.0.0.2" if variable.endswith("HOST") else "127.0.0.1")
    with torchotel.instrument(traces_exporter="none"):
        address = "127.0.0.2" if variable.endswith("HOST") else "127.0.0.1"
        assert b"torch_steps_total" in urlopen(f"http://{address}:{port}/metrics", timeout=5).read()


# What others read, and what nobody reads.


def rows(reader: str) -> list[Variable]:
    return [variable for variable in VARIABLES.values() if variable.reader == reader]


PROVIDERS = [variable.name for variable in rows("provider")]
UNREAD = [variable.name for variable in rows("nobody")]
JUNK = "-1 junk"
TRAIN = """
import torch, torchotel
with torchotel.instrument(set_global_provider={}) as handle:
    with torchotel.step():
        torch.nn.Linear(2, 2)(torch.rand(1, 2)).sum().backward()
print(handle.stats())
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, str]:
    """Give what a program says under variables that hold junk, with a provider of ours and without."""
    environ = {**dict.fromkeys([*PROVIDERS, *UNREAD], JUNK), "OTEL_TRACES_EXPORTER": "console"}
    folder = tmp_path_factory.mktemp("programs")
    told = {}
    for provider in (True, False):
        done = commands.python("-c", TRAIN.format(provider), cwd=folder, OTEL_METRICS_EXPORTER="none", **environ)
        assert done.returncode == 0, done.stderr
        assert "'spans_dropped': 0" in done.stdout
        assert "torch.step" in done.stdout
        told[provider] = done.stderr
    return told


@proves(*PROVIDERS)
def test_a_provider_reads_it(variable: str, told: dict[bool, str]) -> None:
    """It complains of the junk; without it nobody does."""
    assert variable in told[True] or JUNK in told[True]
    assert variable not in told[False]


@proves(*UNREAD)
def test_nobody_reads_it(variable: str, told: dict[bool, str], caplog: pytest.LogCaptureFixture) -> None:
    """Nothing changes, and nobody complains, whatever is in it."""
    assert Config.read({}, {variable: JUNK}) == Config.read({}, {})
    assert variable not in told[True] + told[False]
    assert not caplog.records


# The table is whole.


def test_each_variable_has_a_proof() -> None:
    assert sorted(set(PROVEN)) == sorted(VARIABLES)


def test_the_table_says_who_reads() -> None:
    """What the configuration reads, and only that, is said to be read by torchotel."""
    settings = [field.type.__metadata__[0] for field in dataclasses.fields(Config)]  # type: ignore[union-attr]
    read = {name for setting in settings for name in setting.variables if name.startswith("OTEL_")}
    assert read == {variable.name for variable in rows("torchotel")}
    assert all(variable.does.startswith("not ours: ") for variable in rows("nobody"))


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_code_names_no_other(path: Path) -> None:
    """Every variable of OpenTelemetry that stands in the code stands in the table."""
    strings = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
    named = {text for text in strings if isinstance(text, str) and text.startswith("OTEL_") and text.isupper()}
    assert {text for text in named if text.replace("_", "").isalpha() and not text.endswith("_")} <= set(VARIABLES)
