"""Variables that are not taken as they are: what is used instead, and what the log says of it."""

import logging

import pytest

from torchotel.config.config import Config


@pytest.mark.parametrize(
    ("variable", "text"),
    [("OTEL_TRACES_SAMPLER", "jaeger_remote"), ("OTEL_TRACES_SAMPLER_ARG", "2"), ("OTEL_TRACES_SAMPLER_ARG", "half")],
)
def test_ignores_a_sampler_that_is_not_known_with_a_warning(
    variable: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert Config.read({}, {variable: text}) == Config()
    assert [variable in record.getMessage() and text in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("variable", "text", "field", "used"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin", "traces_exporter", "otlp"),
        ("OTEL_TRACES_EXPORTER", "zipkin,Console", "traces_exporter", "console"),
        ("OTEL_TRACES_EXPORTER", "console,otlp", "traces_exporter", "otlp"),
        ("OTEL_TRACES_EXPORTER", "file", "traces_exporter", "otlp"),
        ("OTEL_TRACES_EXPORTER", "foo,console", "traces_exporter", "console"),
        ("OTEL_METRICS_EXPORTER", "console", "metrics_exporter", "prometheus"),
        ("OTEL_METRICS_EXPORTER", "otlp,foo", "metrics_exporter", "otlp"),
        ("OTEL_METRICS_EXPORTER", "console, otlp", "metrics_exporter", "otlp"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "protocol", "http/protobuf"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "deflate", "compression", "gzip"),
    ],
)
def test_leaves_out_what_is_meant_for_another_reader_of_a_variable_and_says_so_once(
    variable: str, text: str, field: str, used: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A variable holds for the SDK, too, and what is legal there is no mistake."""
    for _ in range(2):
        value = getattr(Config.read({}, {variable: text}), field)
        assert value == ((used,) if field == "metrics_exporter" else used)
    (record,) = caplog.records
    assert record.getMessage() == f"{variable}: torchotel's own exporters do not take {text!r}, and use {used!r}"


def test_skips_headers_that_no_request_can_carry(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "torchotel"):
        config = Config.read({}, {"OTEL_EXPORTER_OTLP_TRACES_HEADERS": "key=%E2%82%AC-secret,sound=1"})
    assert config.headers == {"sound": "1"}
    (record,) = caplog.records
    assert "header number 1" in record.getMessage()
    assert "secret" not in record.getMessage()


def test_skips_headers_that_are_malformed(caplog: pytest.LogCaptureFixture) -> None:
    environ = {
        "OTEL_EXPORTER_OTLP_HEADERS": "shared=1,secret-without-equals,b=a%0d%0ainjected,api-key=general",
    }
    with caplog.at_level(logging.WARNING, "torchotel"):
        config = Config.read({}, environ)
    assert config.headers == config.metrics_headers == {"shared": "1", "api-key": "general"}
    assert len(caplog.records) == 2  # each is for both signals, and told once
    assert "secret" not in caplog.text


@pytest.mark.parametrize(("text", "used_s"), [("10000", 10_000), ("100000", 86_400)])
def test_warns_of_a_timeout_that_looks_like_milliseconds(
    text: str, used_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    assert Config.read({}, {"OTEL_EXPORTER_OTLP_TIMEOUT": text}).timeout_s == used_s
    assert "seconds" in caplog.text


def test_fails_on_no_variable_while_disabled() -> None:
    environ = {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}
    assert Config.read({}, environ).disabled


def test_counts_an_unknown_word_of_the_sdk_flag_as_false(caplog: pytest.LogCaptureFixture) -> None:
    assert not Config.read({}, {"OTEL_SDK_DISABLED": "1"}).disabled
    assert caplog.messages == ["OTEL_SDK_DISABLED counts as False: got '1', takes True or False"]


def test_names_the_variable_of_the_signal_that_has_a_bad_flag(caplog: pytest.LogCaptureFixture) -> None:
    """The specification: a bad flag is false, so the general variable does not count."""
    environ = {"OTEL_EXPORTER_OTLP_TRACES_INSECURE": "yes", "OTEL_EXPORTER_OTLP_INSECURE": "true"}
    assert not Config.read({}, environ).insecure
    assert caplog.messages == ["OTEL_EXPORTER_OTLP_TRACES_INSECURE counts as False: got 'yes', takes True or False"]


def test_a_variable_that_is_nobodys_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """A misspelt name with our prefix would else mean its default, silently; others' names are theirs."""
    for _ in range(2):
        Config.read({}, {"TORCHOTEL_DETIAL": "all", "OTEL_MADE_UP": "1", "TORCHOTEL_BACKENDS": "x"})
    (record,) = caplog.records
    assert record.getMessage().startswith("TORCHOTEL_DETIAL is not known to torchotel and ignored")
