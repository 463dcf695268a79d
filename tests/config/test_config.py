"""Settings: what each takes, from an argument or a variable, and how it is shown."""

from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CollectorRegistry

from torchotel._types import UNSET, ConfigError
from torchotel._utils.distributed import own_port
from torchotel.config.config import Config

BAD: list[tuple[str, list[object]]] = [
    ("service_name", ["", "  ", 3, b"name"]),
    (
        "endpoint",
        ["", "localhost:4318", "ftp://host", "http://", "http://host:port", "http://h/?q=1", None, 4318],
    ),
    ("traces_endpoint", ["host/v1/traces", "http://:4318/v1/traces", None]),
    ("protocol", ["http/json", None, 1]),
    ("headers", [None, "a=b", {"a b": "c"}, {"a": 1}, {"a": "b\r\nc: d"}, {1: "a"}, [("a", "b")]]),
    ("headers", [{"a": "schlüssel"}, {"a": "\u20ac"}, {"a": " b"}, {"a": "b\tc"}]),
    ("compression", ["deflate", None, True]),
    ("timeout_s", [0, -1, float("nan"), float("inf"), "10", True, None]),
    ("certificate", ["/no/such/file", 1, ""]),
    ("client_certificate", ["/no/such/file"]),
    ("client_key", ["/no/such/file"]),
    ("traces_exporter", ["zipkin", None]),
    ("metrics_endpoint", ["host/v1/metrics", None]),
    ("metrics_interval_s", [0, "60", None]),
    ("metrics_protocol", ["http/json", None]),
    ("metrics_timeout_s", [0, "10"]),
    ("metrics_certificate", ["/no/such/file"]),
    ("metrics_client_certificate", ["/no/such/file"]),
    ("metrics_client_key", ["/no/such/file"]),
    ("insecure", [None, "true"]),
    ("metrics_insecure", [1]),
    ("metrics_export_timeout_s", [0, "30"]),
    ("metrics_temporality", ["Delta", None]),
    ("metrics_histograms", ["exponential", None]),
    ("attribute_count_limit", [-1, None, True, "8"]),
    ("attribute_value_length_limit", [-1, 1.0]),
    ("event_value_length_limit", [-1, 1.0]),
    ("event_count_limit", [-1, None]),
    ("link_count_limit", [-1, None]),
    ("event_attribute_count_limit", [-1, None]),
    ("link_attribute_count_limit", [-1, None]),
    ("sampler", ["sometimes", None]),
    ("sampler_ratio", [-0.1, 1.1, "1", True, float("nan")]),
    ("metrics_exporter", ["console", "", "prometheus,", ["otlp", "none"], ["otlp", 1], None, {"otlp"}]),
    ("tracer_provider", [1, "provider", object(), TracerProvider]),
    ("meter_provider", [TracerProvider(), MeterProvider]),
    ("set_global_provider", [None, 1]),
    ("prometheus_port", [-1, 65_536, "9464", True, 1.0]),
    ("prometheus_host", ["", None, 1]),
    ("prometheus_registry", [object(), CollectorRegistry]),
    ("discovery_dir", ["", 1, __file__]),
    ("record", ["", 1, True, __file__]),
    ("detail", ["some", 0, -1, True, 1.5, None]),
    ("stall_timeout_s", [0, -1, "60", True, None, float("nan")]),
    ("channel_bytes", [0, 65_535, 2**30 + 1, "65536", True, None, 65_536.0]),
    ("overhead_budget", [0, 0.0, -0.1, 1.1, "0.1", True, None, float("nan")]),
    ("include", ["", ",", [], [""], 3, {"a": "b"}, ["a", None]]),
    ("exclude", ["a,,b", b"a"]),
    ("max_depth", [-1, True, "1", 1.0]),
    ("max_spans", [9, True, "none", 2000.0]),
    ("module_histograms", [1, None]),
    ("gradient_norms", ["some", 0, -1, 1.5, None]),
    ("shapes", [1, 0, None, "true"]),
    ("exception_text", ["", "none", True, None]),
    ("run_id", ["", 7]),
    ("disabled", ["true", 1, None]),
]
BAD_VARIABLES = [
    ("set_global_provider", "TORCHOTEL_SET_GLOBAL_PROVIDER", "yes"),
    ("discovery_dir", "TORCHOTEL_DISCOVERY_DIR", __file__),
    ("module_histograms", "TORCHOTEL_MODULE_HISTOGRAMS", "yes"),
    ("gradient_norms", "TORCHOTEL_GRADIENT_NORMS", "sometimes"),
    ("record", "TORCHOTEL_RECORD", __file__),
    ("detail", "TORCHOTEL_DETAIL", "sometimes"),
    ("detail", "TORCHOTEL_DETAIL", "0"),
    ("overhead_budget", "TORCHOTEL_OVERHEAD_BUDGET", "1%"),
    ("stall_timeout_s", "TORCHOTEL_STALL_TIMEOUT_S", "1m"),
    ("channel_bytes", "TORCHOTEL_CHANNEL_BYTES", "16M"),
    ("overhead_budget", "TORCHOTEL_OVERHEAD_BUDGET", "0"),
    ("include", "TORCHOTEL_INCLUDE", "a,,b"),
    ("exclude", "TORCHOTEL_EXCLUDE", ","),
    ("max_depth", "TORCHOTEL_MAX_DEPTH", "deep"),
    ("max_spans", "TORCHOTEL_MAX_SPANS", "9"),
    ("shapes", "TORCHOTEL_SHAPES", "yes"),
    ("exception_text", "TORCHOTEL_EXCEPTION_TEXT", "some"),
]
IGNORED_VARIABLES = [
    ("endpoint", "OTEL_EXPORTER_OTLP_ENDPOINT", "localhost:4318"),
    ("traces_endpoint", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "localhost:4318/v1/traces"),
    ("protocol", "OTEL_EXPORTER_OTLP_PROTOCOL", "http"),
    ("protocol", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/xml"),
    ("compression", "OTEL_EXPORTER_OTLP_COMPRESSION", "zip"),
    ("compression", "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "zstd"),
    ("timeout_s", "OTEL_EXPORTER_OTLP_TIMEOUT", "ten"),
    ("certificate", "OTEL_EXPORTER_OTLP_CERTIFICATE", "/no/such/file"),
    ("client_certificate", "OTEL_EXPORTER_OTLP_TRACES_CLIENT_CERTIFICATE", "/no/such/file"),
    ("client_key", "OTEL_EXPORTER_OTLP_CLIENT_KEY", "/no/such/file"),
    ("traces_exporter", "OTEL_TRACES_EXPORTER", "otlp,none"),
    ("metrics_endpoint", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "localhost:4318/v1/metrics"),
    ("metrics_compression", "OTEL_EXPORTER_OTLP_METRICS_COMPRESSION", "zstd"),
    ("metrics_interval_s", "OTEL_METRIC_EXPORT_INTERVAL", "0"),
    ("metrics_exporter", "OTEL_METRICS_EXPORTER", "prometheus,none"),
    ("prometheus_port", "OTEL_EXPORTER_PROMETHEUS_PORT", "http"),
    ("prometheus_host", "OTEL_EXPORTER_PROMETHEUS_HOST", "203.0.113.7"),
    ("prometheus_host", "OTEL_EXPORTER_PROMETHEUS_HOST", "." * 64),
    ("timeout_s", "OTEL_EXPORTER_OTLP_TIMEOUT", "-1"),
    ("timeout_s", "OTEL_EXPORTER_OTLP_TIMEOUT", "nan"),
    ("timeout_s", "OTEL_EXPORTER_OTLP_TIMEOUT", "inf"),
    ("metrics_timeout_s", "OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "soon"),
    ("metrics_interval_s", "OTEL_METRIC_EXPORT_INTERVAL", "abc"),
    ("metrics_export_timeout_s", "OTEL_METRIC_EXPORT_TIMEOUT", "-5"),
    ("metrics_temporality", "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "mixed"),
    ("metrics_histograms", "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION", "summary"),
    ("attribute_count_limit", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "foo"),
    ("attribute_value_length_limit", "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "-1"),
    ("event_count_limit", "OTEL_SPAN_EVENT_COUNT_LIMIT", "1.5"),
    ("link_count_limit", "OTEL_SPAN_LINK_COUNT_LIMIT", "many"),
    ("prometheus_port", "OTEL_EXPORTER_PROMETHEUS_PORT", "65536"),
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
    ("metrics_endpoint", "OTEL_EXPORTER_OTLP_ENDPOINT", "https://host/otlp/", "https://host/otlp/v1/metrics"),
    ("metrics_endpoint", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "https://host/x", "https://host/x"),
    ("metrics_headers", "OTEL_EXPORTER_OTLP_METRICS_HEADERS", "a=b", {"a": "b"}),
    ("metrics_compression", "OTEL_EXPORTER_OTLP_METRICS_COMPRESSION", "none", "none"),
    ("metrics_interval_s", "OTEL_METRIC_EXPORT_INTERVAL", "2500", 2.5),
    ("sampler", "OTEL_TRACES_SAMPLER", "TraceIdRatio", "traceidratio"),
    ("sampler_ratio", "OTEL_TRACES_SAMPLER_ARG", "0.25", 0.25),
    ("metrics_exporter", "OTEL_METRICS_EXPORTER", "Prometheus, otlp,otlp", ("prometheus", "otlp")),
    ("metrics_exporter", "OTEL_METRICS_EXPORTER", "none", ()),
    ("set_global_provider", "TORCHOTEL_SET_GLOBAL_PROVIDER", "true", True),
    ("prometheus_port", "OTEL_EXPORTER_PROMETHEUS_PORT", "0", 0),
    ("prometheus_port", "OTEL_EXPORTER_PROMETHEUS_PORT", "none", None),
    ("prometheus_host", "OTEL_EXPORTER_PROMETHEUS_HOST", "::1", "::1"),
    ("discovery_dir", "TORCHOTEL_DISCOVERY_DIR", "targets", Path("targets")),
    ("module_histograms", "TORCHOTEL_MODULE_HISTOGRAMS", "1", True),
    ("gradient_norms", "TORCHOTEL_GRADIENT_NORMS", "AUTO", "auto"),
    ("gradient_norms", "TORCHOTEL_GRADIENT_NORMS", "0", False),
    ("gradient_norms", "TORCHOTEL_GRADIENT_NORMS", "16", 16),
    ("record", "TORCHOTEL_RECORD", "runs/one", Path("runs/one")),
    ("detail", "TORCHOTEL_DETAIL", "all", "all"),
    ("detail", "TORCHOTEL_DETAIL", "16", 16),
    ("overhead_budget", "TORCHOTEL_OVERHEAD_BUDGET", "0.05", 0.05),
    ("stall_timeout_s", "TORCHOTEL_STALL_TIMEOUT_S", "90", 90.0),
    ("channel_bytes", "TORCHOTEL_CHANNEL_BYTES", "65536", 65_536),
    ("include", "TORCHOTEL_INCLUDE", "layer1.*, fc", ("layer1.*", "fc")),
    ("exclude", "TORCHOTEL_EXCLUDE", "*.bn?", ("*.bn?",)),
    ("max_depth", "TORCHOTEL_MAX_DEPTH", "3", 3),
    ("max_depth", "TORCHOTEL_MAX_DEPTH", "none", None),
    ("max_spans", "TORCHOTEL_MAX_SPANS", "None", None),
    ("shapes", "TORCHOTEL_SHAPES", "False", False),
    ("shapes", "TORCHOTEL_SHAPES", "1", True),
    ("exception_text", "TORCHOTEL_EXCEPTION_TEXT", "Type", "type"),
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


@pytest.mark.parametrize("end", ["?token=secret", "#secret", "?#"])
def test_uses_an_endpoint_without_its_query(end: str, caplog: pytest.LogCaptureFixture) -> None:
    """The specification demands that host, port and path are used; all else may be ignored."""
    variable = "OTEL_EXPORTER_OTLP_ENDPOINT"
    read = Config.read({}, {variable: f"https://user:word@host:1/otlp/{end}"})
    assert read.traces_endpoint == "https://user:word@host:1/otlp/v1/traces"
    (record,) = caplog.records
    assert record.getMessage() == f"{variable}: its query or fragment is ignored, and https://host:1/otlp/ is used"


@pytest.mark.parametrize(("name", "variable", "text"), IGNORED_VARIABLES)
def test_ignores_a_bad_value_of_a_variable_that_others_read(
    name: str, variable: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be meant for another program; the default holds, and one warning names it."""
    assert Config.read({}, {variable: text}) == Config()
    (record,) = caplog.records
    hint: Any = Config.__dataclass_fields__[name].type
    takes = hint.__metadata__[0].kind.takes
    assert record.getMessage() == f"{variable} is ignored: got {text!r}, takes {takes}"


def test_falls_back_from_a_bad_variable_to_the_general_one() -> None:
    environ = {"OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": "zstd", "OTEL_EXPORTER_OTLP_COMPRESSION": "none"}
    assert Config.read({}, environ).compression == "none"


@pytest.mark.parametrize("variable", ["OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_METRIC_EXPORT_TIMEOUT"])
def test_a_timeout_of_zero_is_no_limit(variable: str, caplog: pytest.LogCaptureFixture) -> None:
    """As the specification has it; a day, since sockets take no infinite timeout."""
    config = Config.read({}, {variable: "0"})
    day_s = 24 * 60 * 60
    metric = variable.startswith("OTEL_METRIC")
    assert (config.metrics_export_timeout_s if metric else config.timeout_s) == day_s
    assert caplog.records == []


def test_ignores_the_key_of_a_certificate_that_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    assert Config.read({}, {"OTEL_EXPORTER_OTLP_CLIENT_KEY": __file__}) == Config()
    assert all("is ignored: there is no client certificate" in record.getMessage() for record in caplog.records)
    assert len(caplog.records) == 2  # for traces and for metrics


@pytest.mark.parametrize(("name", "variable", "text", "value"), GOOD_VARIABLES)
def test_reads_a_variable_for_what_is_left_out(name: str, variable: str, text: str, value: object) -> None:
    assert getattr(Config.read({name: UNSET}, {variable: text}), name) == value


@pytest.mark.parametrize("variable", sorted({variable for _, variable, _, _ in GOOD_VARIABLES}))
def test_counts_an_empty_variable_as_unset(variable: str) -> None:
    assert Config.read({}, {variable: " "}) == Config()


def test_has_the_defaults_of_the_conventions() -> None:
    assert Config.read({}, {}).public() == {
        "endpoint": "http://localhost:4318",
        "exemplar_filter": "trace_based",
        "exception_text": "first_line",
        "traces_endpoint": "http://localhost:4318/v1/traces",
        "protocol": "http/protobuf",
        "compression": "gzip",
        "timeout_s": 10.0,
        "insecure": False,
        "attribute_count_limit": 128,
        "event_count_limit": 128,
        "link_count_limit": 128,
        "event_attribute_count_limit": 128,
        "link_attribute_count_limit": 128,
        "metrics_protocol": "http/protobuf",
        "metrics_compression": "gzip",
        "metrics_timeout_s": 10.0,
        "metrics_insecure": False,
        "metrics_interval_s": 60.0,
        "metrics_export_timeout_s": 30.0,
        "metrics_temporality": "cumulative",
        "metrics_histograms": "explicit_bucket_histogram",
        "metrics_endpoint": "http://localhost:4318/v1/metrics",
        "traces_exporter": "otlp",
        "sampler": "parentbased_always_on",
        "sampler_ratio": 1.0,
        "metrics_exporter": ("prometheus",),
        "set_global_provider": False,
        "prometheus_port": 9464,
        "prometheus_host": "127.0.0.1",
        "detail": "auto",
        "overhead_budget": 0.01,
        "max_spans": 2000,
        "module_histograms": False,
        "gradient_norms": "auto",
        "shapes": True,
        "worker": "auto",
        "stall_timeout_s": 60.0,
        "channel_bytes": 16_777_216,
        "disabled": False,
    }


def test_shows_no_more_of_an_object_than_its_class() -> None:
    given = {"tracer_provider": TracerProvider(), "prometheus_registry": CollectorRegistry()}
    config = Config.read(given, {})
    assert config == Config.read(given, {})
    assert config != Config.read({**given, "prometheus_registry": CollectorRegistry()}, {})
    shown = config.public()
    assert (shown["tracer_provider"], shown["prometheus_registry"]) == ("TracerProvider", "CollectorRegistry")
    assert "meter_provider" not in shown


def test_gives_each_local_rank_a_port_of_its_own() -> None:
    assert [own_port(9464, rank) for rank in range(3)] == [9464, 9465, 9466]
    assert own_port(9464, None) == 9464
    assert own_port(0, 3) == 0
    assert own_port(65_535, 1) == 0


def test_shows_no_credential() -> None:
    given = {"headers": {"authorization": "secret"}, "endpoint": "https://user:secret@host:1/x"}
    config = Config.read(given, {})
    assert config.public()["traces_endpoint"] == "https://host:1/x/v1/traces"
    assert "secret" not in str(config.public())
    with pytest.raises(ConfigError) as caught:
        Config.read({"headers": {"authorization": "secret", "bad name": "secret"}}, {})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("endpoint", ["localhost", "", "http://", "a b:4317", "[zz]:4317"])
def test_refuses_a_target_that_grpc_could_not_read(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="endpoint: got"):
        Config.read({"protocol": "grpc", "endpoint": endpoint}, {})


def test_wants_a_certificate_with_a_key() -> None:
    with pytest.raises(ConfigError, match="client_key: got"):
        Config(client_key=__file__)
    assert Config(client_key=__file__, client_certificate=__file__).client_certificate == __file__


def test_brings_values_into_one_form(tmp_path: Path) -> None:
    config = Config.read({"include": ["a", " b "], "exclude": "c, d", "record": str(tmp_path), "timeout_s": 5}, {})
    assert (config.include, config.exclude) == (("a", "b"), ("c", "d"))
    assert (config.record, config.timeout_s) == (tmp_path, 5.0)
    assert config.public()["record"] == str(tmp_path)
