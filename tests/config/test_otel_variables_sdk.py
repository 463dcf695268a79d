"""Each other variable that torchotel reads has the effect that `config/otel_variables.py` states."""

import socket
from typing import NamedTuple
from urllib.request import urlopen

import pytest
import torch
from support.otlp_http_receiver import Answer, Receiver
from support.recorded_training import plain
from support.variable_effects import OTLP, Program, proves

import torchotel


@pytest.fixture
def program(server: Receiver) -> Program:
    return Program(server)


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


def test_a_limit_beyond_sys_maxsize_drops_no_span(program: Program) -> None:
    """`itertools.islice` raises ValueError for such a number."""
    counts = program.run({"OTEL_ATTRIBUTE_COUNT_LIMIT": "9" * 20, "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": "9" * 20})
    assert counts["spans_exported"] == counts["spans_recorded"] > 0


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
    """The flush's push is refused twice, and tried again while there is time; the end has a push of its own."""
    for environ, requests in (({variable: "100"}, 3), ({}, 4)):
        program.server.pushed.clear()
        program.server.push_answers.extend([Answer(503)] * 2)
        assert program.run(environ)["export_errors"] == 2
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
