"""Settings: what each takes, where it is read from, and what is said of a bad one."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from torchotel._config import UNSET, Config
from torchotel._errors import ConfigError

BAD: list[tuple[str, list[object]]] = [
    ("service_name", ["", "  ", 3, b"name"]),
    (
        "endpoint",
        ["", "localhost:4318", "ftp://host", "http://", "http://host:port", "http://h/?q=1", None, 4318],
    ),
    ("traces_endpoint", ["host/v1/traces", "http://:4318/v1/traces", None]),
    ("protocol", ["grpc", "http/json", None, 1]),
    ("headers", [None, "a=b", {"a b": "c"}, {"a": 1}, {"a": "b\r\nc: d"}, {1: "a"}, [("a", "b")]]),
    ("compression", ["deflate", None, True]),
    ("timeout_s", [0, -1, float("nan"), float("inf"), "10", True, None]),
    ("certificate", ["/no/such/file", 1, ""]),
    ("client_certificate", ["/no/such/file"]),
    ("client_key", ["/no/such/file"]),
    ("traces_exporter", ["console", "zipkin", None]),
    ("record", ["", 1, True, __file__]),
    ("detail", ["some", 0, -1, True, 1.5, None]),
    ("include", ["", ",", [], [""], 3, {"a": "b"}, ["a", None]]),
    ("exclude", ["a,,b", b"a"]),
    ("max_depth", [-1, True, "1", 1.0]),
    ("max_spans", [9, True, "none", 2000.0]),
    ("shapes", [1, 0, None, "true"]),
    ("run_id", ["", 7]),
    ("disabled", ["true", 1, None]),
]

BAD_VARIABLES = [
    ("endpoint", "OTEL_EXPORTER_OTLP_ENDPOINT", "localhost:4318"),
    ("traces_endpoint", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "localhost:4318/v1/traces"),
    ("protocol", "OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
    ("protocol", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
    ("compression", "OTEL_EXPORTER_OTLP_COMPRESSION", "deflate"),
    ("compression", "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "zstd"),
    ("timeout_s", "OTEL_EXPORTER_OTLP_TIMEOUT", "ten"),
    ("timeout_s", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "0"),
    ("certificate", "OTEL_EXPORTER_OTLP_CERTIFICATE", "/no/such/file"),
    ("client_certificate", "OTEL_EXPORTER_OTLP_TRACES_CLIENT_CERTIFICATE", "/no/such/file"),
    ("client_key", "OTEL_EXPORTER_OTLP_CLIENT_KEY", "/no/such/file"),
    ("traces_exporter", "OTEL_TRACES_EXPORTER", "console"),
    ("record", "TORCHOTEL_RECORD", __file__),
    ("detail", "TORCHOTEL_DETAIL", "sometimes"),
    ("detail", "TORCHOTEL_DETAIL", "0"),
    ("include", "TORCHOTEL_INCLUDE", "a,,b"),
    ("exclude", "TORCHOTEL_EXCLUDE", ","),
    ("max_depth", "TORCHOTEL_MAX_DEPTH", "deep"),
    ("max_spans", "TORCHOTEL_MAX_SPANS", "9"),
    ("shapes", "TORCHOTEL_SHAPES", "yes"),
]

GOOD_VARIABLES: list[tuple[str, str, str, object]] = [
    ("service_name", "OTEL_SERVICE_NAME", "trainer", "trainer"),
    ("endpoint", "OTEL_EXPORTER_OTLP_ENDPOINT", "https://host/otlp", "https://host/otlp"),
    ("traces_endpoint", "OTEL_EXPORTER_OTLP_ENDPOINT", "https://host/otlp/", "https://host/otlp/v1/traces"),
    ("traces_endpoint", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://host/x?k=1", "https://host/x?k=1"),
    ("protocol", "OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf", "http/protobuf"),
    ("headers", "OTEL_EXPORTER_OTLP_HEADERS", "A=b%20c, x=y=z,", {"a": "b c", "x": "y=z"}),
    ("compression", "OTEL_EXPORTER_OTLP_COMPRESSION", "NONE", "none"),
    ("timeout_s", "OTEL_EXPORTER_OTLP_TIMEOUT", "2.5", 2.5),
    ("certificate", "OTEL_EXPORTER_OTLP_CERTIFICATE", __file__, __file__),
    ("traces_exporter", "OTEL_TRACES_EXPORTER", "none", "none"),
    ("record", "TORCHOTEL_RECORD", "runs/one", Path("runs/one")),
    ("detail", "TORCHOTEL_DETAIL", "all", "all"),
    ("detail", "TORCHOTEL_DETAIL", "16", 16),
    ("include", "TORCHOTEL_INCLUDE", "layer1.*, fc", ("layer1.*", "fc")),
    ("exclude", "TORCHOTEL_EXCLUDE", "*.bn?", ("*.bn?",)),
    ("max_depth", "TORCHOTEL_MAX_DEPTH", "3", 3),
    ("max_depth", "TORCHOTEL_MAX_DEPTH", "none", None),
    ("max_spans", "TORCHOTEL_MAX_SPANS", "None", None),
    ("shapes", "TORCHOTEL_SHAPES", "False", False),
    ("shapes", "TORCHOTEL_SHAPES", "1", True),
    ("run_id", "TORCHOTEL_RUN_ID", "run-7", "run-7"),
    ("run_id", "TORCHOTEL_RUN_ID", "none", None),
    ("disabled", "OTEL_SDK_DISABLED", "TRUE", True),
    ("disabled", "OTEL_SDK_DISABLED", "false", False),
]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD for value in values])
def test_names_the_field_what_it_got_and_what_it_takes(name: str, value: object) -> None:
    arguments: Any = {name: value}
    with pytest.raises(ConfigError) as caught:
        Config.read(arguments, {})
    assert caught.value.field == name
    assert str(caught.value).startswith(f"{name}: got ")
    assert str(caught.value).endswith(f", takes {caught.value.takes}")


@pytest.mark.parametrize(("name", "variable", "text"), BAD_VARIABLES)
def test_names_the_variable_of_a_bad_value(name: str, variable: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.read({}, {variable: text})
    assert caught.value.field == name
    assert str(caught.value).startswith(f"{name} (from {variable}): got {text!r}, takes ")


@pytest.mark.parametrize(("name", "variable", "text", "value"), GOOD_VARIABLES)
def test_reads_a_variable_for_what_is_left_out(name: str, variable: str, text: str, value: object) -> None:
    assert getattr(Config.read({name: UNSET}, {variable: text}), name) == value


@pytest.mark.parametrize("variable", sorted({variable for _, variable, _, _ in GOOD_VARIABLES}))
def test_counts_an_empty_variable_as_unset(variable: str) -> None:
    assert Config.read({}, {variable: " "}) == Config()


def test_has_the_defaults_of_the_conventions() -> None:
    assert Config.read({}, {}).public() == {
        "endpoint": "http://localhost:4318",
        "traces_endpoint": "http://localhost:4318/v1/traces",
        "protocol": "http/protobuf",
        "compression": "gzip",
        "timeout_s": 10.0,
        "traces_exporter": "otlp",
        "detail": "auto",
        "max_spans": 2000,
        "shapes": True,
        "disabled": False,
    }


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


def test_takes_the_endpoint_argument_before_the_variable_for_traces() -> None:
    environ = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://traces:2"}
    assert Config.read({"endpoint": "http://mine"}, environ).traces_endpoint == "http://mine/v1/traces"


def test_merges_headers_and_skips_what_is_malformed(caplog: pytest.LogCaptureFixture) -> None:
    environ = {
        "OTEL_EXPORTER_OTLP_HEADERS": "shared=1,secret-without-equals,api-key=general",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "api-key=traces,b=a%0d%0ainjected",
    }
    with caplog.at_level(logging.WARNING, "torchotel"):
        config = Config.read({}, environ)
    assert config.headers == {"shared": "1", "api-key": "traces"}
    assert len(caplog.records) == 2
    assert "secret" not in caplog.text


def test_shows_no_credential() -> None:
    given = {"headers": {"authorization": "secret"}, "endpoint": "https://user:secret@host:1/x"}
    config = Config.read(given, {})
    assert config.public()["traces_endpoint"] == "https://host:1/x/v1/traces"
    assert "secret" not in str(config.public())
    with pytest.raises(ConfigError) as caught:
        Config.read({"headers": {"authorization": "secret", "bad name": "secret"}}, {})
    assert "secret" not in str(caught.value)


def test_warns_of_a_timeout_that_looks_like_milliseconds(caplog: pytest.LogCaptureFixture) -> None:
    assert Config.read({}, {"OTEL_EXPORTER_OTLP_TIMEOUT": "10000"}).timeout_s == 10000
    assert "seconds" in caplog.text


def test_fails_on_no_variable_while_disabled() -> None:
    environ = {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    assert Config.read({}, environ).disabled


def test_counts_an_unknown_word_of_the_sdk_flag_as_false(caplog: pytest.LogCaptureFixture) -> None:
    assert not Config.read({}, {"OTEL_SDK_DISABLED": "1"}).disabled
    assert "OTEL_SDK_DISABLED" in caplog.text


def test_wants_a_certificate_with_a_key() -> None:
    with pytest.raises(ConfigError, match="client_key: got"):
        Config(client_key=__file__)
    assert Config(client_key=__file__, client_certificate=__file__).client_certificate == __file__


def test_leaves_the_process_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TORCHOTEL_DETAIL", "bad")
    assert Config.read({}, {}).detail == "auto"


def test_brings_values_into_one_form(tmp_path: Path) -> None:
    config = Config.read({"include": ["a", " b "], "exclude": "c, d", "record": str(tmp_path), "timeout_s": 5}, {})
    assert (config.include, config.exclude) == (("a", "b"), ("c", "d"))
    assert (config.record, config.timeout_s) == (tmp_path, 5.0)
    assert config.public()["record"] == str(tmp_path)
