"""Which of several sources a setting has: an argument, the variable of a signal, the general one."""

import os

import pytest

from torchotel.config.config import Config


def test_takes_the_argument_before_its_variable_even_where_it_is_none() -> None:
    environ = {"TORCHOTEL_RECORD": "elsewhere", "TORCHOTEL_MAX_SPANS": "50", "TORCHOTEL_DETAIL": "bad"}
    config = Config.read({"record": None, "max_spans": None, "detail": 3}, environ)
    assert (config.record, config.max_spans, config.detail) == (None, None, 3)


def test_takes_the_variable_for_traces_before_the_general_one() -> None:
    environ = {
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
        "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "2",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://general:1",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://traces:2",
    }
    config = Config.read({}, environ)
    assert (config.timeout_s, config.traces_endpoint) == (2.0, "http://traces:2")


def test_takes_the_endpoint_argument_before_the_variable_of_a_signal() -> None:
    environ = {f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT": "http://other:2" for signal in ("TRACES", "METRICS")}
    config = Config.read({"endpoint": "http://mine"}, environ)
    assert (config.traces_endpoint, config.metrics_endpoint) == ("http://mine/v1/traces", "http://mine/v1/metrics")


def test_keeps_what_is_for_one_signal_from_the_other() -> None:
    environ = {
        "OTEL_EXPORTER_OTLP_HEADERS": "all=1",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "traces=1",
        "OTEL_EXPORTER_OTLP_METRICS_HEADERS": "metrics=1",
        "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": "none",
    }
    config = Config.read({}, environ)
    assert (config.headers, config.metrics_headers) == ({"traces": "1"}, {"metrics": "1"})
    assert (config.compression, config.metrics_compression) == ("none", "gzip")


def test_takes_arguments_for_both_signals_before_the_variables_of_either() -> None:
    environ = {"OTEL_EXPORTER_OTLP_METRICS_HEADERS": "metrics=1", "OTEL_EXPORTER_OTLP_METRICS_COMPRESSION": "gzip"}
    config = Config.read({"headers": {"mine": "1"}, "compression": "none"}, environ)
    assert config.headers == config.metrics_headers == {"mine": "1"}
    assert config.compression == config.metrics_compression == "none"


def test_takes_the_general_variable_where_that_of_a_signal_is_for_another_reader() -> None:
    environ = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    assert Config.read({}, environ).protocol == "grpc"


def test_headers_of_one_signal_keep_those_for_all_away() -> None:
    environ = {
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20ours",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "x-vendor-key=theirs",
    }
    config = Config.read({}, environ)
    assert config.otlp_endpoint("traces").headers == {"x-vendor-key": "theirs"}
    assert config.otlp_endpoint("metrics").headers == {"authorization": "Bearer ours"}


@pytest.mark.parametrize(
    ("environ", "traces", "metrics"),
    [
        ({"PROTOCOL": "grpc"}, "http://localhost:4317", "http://localhost:4317"),
        ({"TRACES_PROTOCOL": "grpc"}, "http://localhost:4317", "http://localhost:4318/v1/metrics"),
        ({"METRICS_PROTOCOL": "gRPC"}, "http://localhost:4318/v1/traces", "http://localhost:4317"),
        ({"PROTOCOL": "grpc", "METRICS_ENDPOINT": "https://other"}, "http://localhost:4317", "https://other"),
        ({"PROTOCOL": "grpc", "ENDPOINT": "collector:4317"}, "collector:4317", "collector:4317"),
        ({"METRICS_PROTOCOL": "grpc", "ENDPOINT": "http://c:1"}, "http://c:1/v1/traces", "http://c:1"),
        ({"PROTOCOL": "grpc", "TRACES_PROTOCOL": "http/protobuf"}, "http://localhost:4318/v1/traces", ":4317"),
    ],
)
def test_gives_each_protocol_its_own_form_of_an_endpoint(environ: dict[str, str], traces: str, metrics: str) -> None:
    config = Config.read({}, {f"OTEL_EXPORTER_OTLP_{name}": text for name, text in environ.items()})
    assert config.traces_endpoint == traces
    assert config.metrics_endpoint.endswith(metrics)


def test_takes_the_protocol_argument_for_both_signals() -> None:
    config = Config.read({"protocol": "grpc"}, {"OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/protobuf"})
    assert (config.protocol, config.metrics_protocol) == ("grpc", "grpc")
    assert config.endpoint == config.traces_endpoint == config.metrics_endpoint == "http://localhost:4317"


def test_leaves_the_process_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TORCHOTEL_DETAIL", "bad")
    assert Config.read({}, {}).detail == "auto"
