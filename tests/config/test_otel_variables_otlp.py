"""Each variable of the OTLP exporter has the effect that `config/otel_variables.py` states."""

import socket
from typing import Any

import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality
from support.otlp_grpc_receiver import GrpcReceiver, grpc_receiver
from support.otlp_http_receiver import Receiver
from support.otlp_tls_receivers import Authority, served
from support.variable_effects import OTLP, Program, proves, proves_option

from torchotel.config.config import Config
from torchotel.worker.stats import Stats


@pytest.fixture
def program(server: Receiver) -> Program:
    return Program(server)


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
