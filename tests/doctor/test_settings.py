"""Test the doctor's checks of variables and settings: misspelt, invalid or contradictory ones."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from torchotel._types import ConfigError
from torchotel.doctor import otel_environment, settings
from torchotel.doctor.result import Level

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


def contradicting(environ: Mapping[str, str], **given: object) -> list[str]:
    """Return the findings on settings, without "no settings contradict each other"."""
    found = settings.check_contradictions(settings.read(given, environ).config, given, environ)
    return [finding.text for finding in found if finding.level is not Level.OK]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("OTEL_EXPORTER_OTLP_ENPOINT", ENDPOINT),
        ("OTEL_EXPORTER_OTLP_TRACE_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"),
        ("OTEL_SERVICENAME", "OTEL_SERVICE_NAME"),
        ("otel_service_name", "OTEL_SERVICE_NAME"),
        ("TORCHOTEL_DETAILS", "TORCHOTEL_DETAIL"),
        ("OTLP_EXPORTER_OTLP_ENDPOINT", ENDPOINT),
    ],
)
def test_knows_what_a_misspelt_name_means(name: str, meant: str) -> None:
    (found,) = otel_environment.check_variables({name: "x", "PATH": "/bin"})
    assert found.level is Level.WARNING
    assert found.text == f"{name} is not known"
    assert found.advice == f"Did you mean {meant}?"


def test_lists_what_torchotel_knows_for_a_name_of_its_own_that_it_does_not() -> None:
    (found,) = otel_environment.check_variables({"TORCHOTEL_BANANA": "1"})
    assert found.level is Level.WARNING
    assert "TORCHOTEL_RECORD" in found.advice


def test_leaves_known_names_and_those_of_others_alone() -> None:
    known = {
        ENDPOINT: "http://x",
        "TORCHOTEL_BACKENDS": "/",
        "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "x",
        "OTEL_BSP_SCHEDULE_DELAY": "5",
    }
    (found,) = otel_environment.check_variables(
        {**known, "HOME": "/", "LOCAL_RANK": "0", "SERVICE_NAME": "x", "PROMETHEUS_PORT": "1"}
    )
    assert found.level is Level.OK


def test_tells_what_a_known_variable_does_not_do_here() -> None:
    all_well, found = otel_environment.check_variables({"OTEL_LOGS_EXPORTER": "otlp"})
    assert (all_well.level, found.level) == (Level.OK, Level.OK)
    assert found.advice == "OTEL_LOGS_EXPORTER: not used: torchotel exports no logs"


def test_goes_on_behind_each_variable_that_cannot_be_read() -> None:
    environ = {"TORCHOTEL_DETAIL": "some", "TORCHOTEL_MAX_DEPTH": "-1", "OTEL_SERVICE_NAME": "mine"}
    config, findings = settings.read({}, environ)
    assert config.service_name == "mine"
    assert [finding.level for finding in findings] == [Level.FAILED] * 2
    assert {finding.advice for finding in findings} == {
        "instrument() raises ConfigError for it. Correct or unset TORCHOTEL_DETAIL.",
        "instrument() raises ConfigError for it. Correct or unset TORCHOTEL_MAX_DEPTH.",
    }


def test_tells_what_reading_warns_of_without_secrets() -> None:
    _, findings = settings.read({}, {"OTEL_EXPORTER_OTLP_HEADERS": "sesame", "OTEL_TRACES_SAMPLER": "some"})
    assert [finding.level for finding in findings] == [Level.WARNING] * 2
    assert "sesame" not in repr(findings)


def test_a_bad_value_hides_no_warning() -> None:
    """After an invalid value the settings are read again; warnings, which are logged once, are still reported."""
    environ = {"OTEL_EXPORTER_OTLP_HEADERS": "no pair", "TORCHOTEL_DETAIL": "some"}
    _, findings = settings.read({}, environ)
    assert sorted(finding.level.value for finding in findings) == ["FAILED", "warning"]


def test_a_misspelt_variable_is_reported_once() -> None:
    """A misspelt variable is reported by the check of names only, which suggests the right name."""
    environ = {"TORCHOTEL_DETIAL": "all"}
    assert [finding.level for finding in settings.read({}, environ).findings] == [Level.OK]
    assert [finding.level for finding in otel_environment.check_variables(environ)] == [Level.WARNING]


def test_leaves_a_bad_option_to_the_command() -> None:
    with pytest.raises(ConfigError):
        settings.read({"detail": "some"}, {"TORCHOTEL_DETAIL": "all"})


def test_looks_behind_the_switch_that_turns_all_off() -> None:
    config, (found,) = settings.read({}, {"OTEL_SDK_DISABLED": "true", "OTEL_SERVICE_NAME": "mine"})
    assert config.service_name == "mine"
    assert found.level is Level.WARNING
    assert "OTEL_SDK_DISABLED is true" in found.text


def test_sees_that_a_configuration_file_turns_all_off(tmp_path: Path) -> None:
    file = tmp_path / "otel.yaml"
    file.write_text("file_format: '1.0'\ndisabled: true\n")
    config, (found,) = settings.read({}, {"OTEL_CONFIG_FILE": str(file), "OTEL_SERVICE_NAME": "mine"})
    assert config.service_name == "mine"
    assert found.level is Level.WARNING
    assert "OTEL_CONFIG_FILE names a file with `disabled: true`: nothing is recorded" in found.text


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({ENDPOINT: "http://x:4318", "OTEL_TRACES_EXPORTER": "none"}, f"{ENDPOINT} names an endpoint, but"),
        ({ENDPOINT: "http://x:4317"}, "port 4317 is usually that of grpc"),
        ({ENDPOINT: "http://x:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "port 4318 is usually that of http"),
        (
            {ENDPOINT: "http://x/v1/traces", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "the path of the endpoint has no effect",
        ),
        (
            {ENDPOINT: "http://x:4318", "OTEL_EXPORTER_OTLP_HEADERS": "key=sesame"},
            "headers (key) are sent to x unencrypted",
        ),
        ({"OTEL_EXPORTER_OTLP_CERTIFICATE": __file__}, "has no effect: the endpoint is http://"),
        ({"OTEL_TRACES_SAMPLER": "always_off"}, "OTEL_TRACES_SAMPLER is always_off: no trace is sent"),
        (
            {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"},
            "except those of slow, failed and NaN",
        ),
        ({"OTEL_TRACES_SAMPLER_ARG": "0.1"}, "OTEL_TRACES_SAMPLER_ARG has no effect"),
        ({"OTEL_EXPORTER_OTLP_TIMEOUT": "5", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "50"}, "overrides"),
        ({"OTEL_EXPORTER_OTLP_HEADERS": "a=1", "OTEL_EXPORTER_OTLP_METRICS_HEADERS": "b=2"}, "overrides"),
        (
            {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x/v1/traces"},
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT applies to traces only; metrics are sent to http://localhost:4318",
        ),
        ({"OTEL_EXPORTER_PROMETHEUS_PORT": "1", "OTEL_METRICS_EXPORTER": "none"}, "has no effect: metrics_exporter"),
        ({"OTEL_EXPORTER_PROMETHEUS_PORT": "none", "TORCHOTEL_DISCOVERY_DIR": "/x"}, "prometheus_port is none"),
        ({"OTEL_METRIC_EXPORT_INTERVAL": "100"}, "has no effect: metrics_exporter is prometheus"),
        ({"TORCHOTEL_DETAIL": "off"}, "no gradient norms are read"),
        ({"TORCHOTEL_DETAIL": "off", "TORCHOTEL_GRADIENT_NORMS": "1", "TORCHOTEL_INCLUDE": "a"}, "TORCHOTEL_INCLUDE"),
    ],
)
def test_tells_what_does_not_go_together(environ: dict[str, str], text: str) -> None:
    (found,) = contradicting(environ)
    assert text in found


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {ENDPOINT: "https://x:4318", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://x:4318/v1/traces"},
        {ENDPOINT: "http://x:4318", "OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "otlp"},
        {"TORCHOTEL_DETAIL": "off", "TORCHOTEL_GRADIENT_NORMS": "true"},
        {"OTEL_EXPORTER_PROMETHEUS_PORT": "none"},
    ],
)
def test_finds_nothing_where_there_is_nothing(environ: dict[str, str]) -> None:
    assert contradicting(environ) == []


def test_names_an_option_by_its_flag() -> None:
    (found,) = contradicting({}, endpoint="http://x:4318", traces_exporter="none")
    assert found == "--endpoint names an endpoint, but traces_exporter is none: nothing is sent there"


def test_finds_what_opentelemetry_instrument_would_fail_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchotel's default exporter is one that the SDK finds only with another package installed."""
    (found,) = settings.check_sdk_exporters(
        {"OTEL_METRICS_EXPORTER": "otlp, prometheus", "OTEL_TRACES_EXPORTER": "console"}
    )
    assert found.level is Level.WARNING
    assert "OTEL_METRICS_EXPORTER=prometheus" in found.text
    assert "install opentelemetry-exporter-prometheus" in found.advice
    (tmp_path / "exporter-1.dist-info").mkdir()
    (tmp_path / "exporter-1.dist-info" / "METADATA").write_text("Name: exporter\nVersion: 1\n")
    entry = "[opentelemetry_metrics_exporter]\nprometheus = exporter:Reader\n"
    (tmp_path / "exporter-1.dist-info" / "entry_points.txt").write_text(entry)
    monkeypatch.syspath_prepend(tmp_path)
    assert not list(settings.check_sdk_exporters({"OTEL_METRICS_EXPORTER": "prometheus"}))


def test_lets_words_that_the_sdk_does_without_be() -> None:
    assert not list(settings.check_sdk_exporters({"OTEL_METRICS_EXPORTER": "none", "OTEL_TRACES_EXPORTER": " "}))
