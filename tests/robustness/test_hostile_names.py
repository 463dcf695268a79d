"""Names of modules, classes, services and values go through every exit: cut, escaped, and still told apart."""

import json
from pathlib import Path
from typing import Literal

import pytest
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support import hostile_inputs
from support.otlp_http_receiver import Receiver
from support.recorded_training import plain
from support.scraped_metrics import OPENMETRICS, scrape
from torch import Tensor, nn

import torchotel
from torchotel._limits import MAX_NAME

MODULE = hostile_inputs.NAME.replace(".", "")  # torch takes no dot in a module's name
CLASS = hostile_inputs.NAME.replace("\ud800", "").replace("\x00", "")  # Python takes neither in a class's
LONG = hostile_inputs.LONG


def train(steps: int = 2) -> None:
    """Train a model whose every name is hostile, and fail at the end."""
    layer = type(CLASS, (nn.Linear,), {})
    model = type(LONG, (nn.Sequential,), {})()
    model.add_module(MODULE, layer(4, 4))
    model.add_module(LONG, nn.Sequential(layer(4, 4)))
    model.get_submodule(MODULE).register_forward_hook(_watch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        torchotel.log(**{hostile_inputs.NAME: 1.0, LONG: 2.0, "text": LONG})
    with pytest.raises(Exception, match="x"):
        _fail(model)


def _fail(model: nn.Module) -> None:
    with torchotel.step():
        model(torch.ones(2, 4))
        raise type(CLASS, (Exception,), {})(hostile_inputs.NAME + LONG)


def _watch(_module: nn.Module, _args: object, output: Tensor) -> None:
    torchotel.watch(output, hostile_inputs.NAME)
    torchotel.watch(output, LONG)


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_every_exit_takes_hostile_names(
    worker: Literal["thread", "process"],
    server: Receiver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """OTLP, the run file and its readers, both formats of a scrape, and pushed metrics: nothing is lost over a name."""
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=" + "x" * 10_000)
    handle = torchotel.instrument(
        worker=worker,
        endpoint=server.url.removesuffix("/v1/traces"),
        metrics_exporter="prometheus,otlp",
        service_name=hostile_inputs.NAME + LONG,
        run_id=hostile_inputs.NAME + LONG,
        record=tmp_path / "run",
        detail="all",
        gradient_norms=True,
    )
    train()
    assert handle.flush()
    pages = [scrape(handle.prometheus_port), scrape(handle.prometheus_port, OPENMETRICS)]
    handle.shutdown()
    stats = handle.stats()
    assert stats["internal_errors"] == stats["spans_dropped"] == stats["export_errors"] == 0

    for page in pages:  # both were parsed by Prometheus's own parsers
        labels = [label for sample in page.series for _, label in sample[1]]
        assert any("\x1b[2J" in label and '"' in label for label in labels)
        assert max(map(len, [*labels, *page.target.values()])) <= MAX_NAME
    for span in server.spans:
        texts = [span.name, span.status.message, *_texts(span.attributes)]
        texts += [text for event in span.events for text in _texts(event.attributes)]
        assert max(map(len, texts)) <= 4 * MAX_NAME + 1  # messages of exceptions are longer
    resource = server.requests[0].message.resource_spans[0].resource
    texts = _texts(resource.attributes)
    texts.remove("x" * 10_000)  # attributes of the variable are exempt from limits
    assert max(map(len, texts)) <= MAX_NAME
    assert server.wait_for_pushed(1)

    for file in (tmp_path / "run").glob("*.json*"):
        text = file.read_bytes()
        assert all(json.loads(line) for line in ([text] if file.suffix == ".json" else text.split(b"\n")[:-1]))
        assert len(text) < 1_000_000
    capsys.readouterr()
    for words in (["summary"], ["report", "-o", str(tmp_path / "page.html")]):
        command, *options = words
        assert torchotel_main([command, str(tmp_path / "run"), *options]) == 0
        said = capsys.readouterr().out
        assert said.replace("\n", "").isprintable()
        assert len(said) < 20_000


def torchotel_main(words: list[str]) -> int:
    from torchotel.cli import main  # noqa: PLC0415  # beside the package's own name

    return main(words)


def _texts(attributes: object) -> list[str]:
    texts = [""]
    for pair in attributes:  # type: ignore[attr-defined]  # protobuf's repeated field
        value = plain(pair.value)
        texts += [pair.key, *(value if isinstance(value, list) else [str(value)])]
    return texts


def test_a_console_takes_hostile_names(capsys: pytest.CaptureFixture[str]) -> None:
    """Each span is one printable line of bounded length."""
    with torchotel.instrument(traces_exporter="console", metrics_exporter="none", detail="all"):
        train()
    lines = capsys.readouterr().out.splitlines()
    assert any("forward" in line for line in lines)
    assert all(line.isprintable() and len(line) < 20 * MAX_NAME for line in lines)


def test_a_given_provider_takes_hostile_names() -> None:
    """The SDK's exporters cannot encode half a character, so it goes before."""
    memory = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    with torchotel.instrument(tracer_provider=provider, metrics_exporter="none", detail="all") as handle:
        train()
    assert handle.stats()["internal_errors"] == 0
    names = [span.name for span in memory.get_finished_spans()]
    assert any("\x1b[2J" in name for name in names)
    assert max(len(name.encode()) for name in names) < 4 * MAX_NAME
    provider.shutdown()


@pytest.mark.parametrize("detectors", ["process", "otel,process,os"])
def test_arguments_of_the_program_stay_at_home(
    detectors: str, server: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever detector looks for them: a password may be among them."""
    from opentelemetry.sdk import resources  # noqa: PLC0415  # a test alone needs it

    found = resources.Resource({"process.command_args": ["train.py", "hunter2"], "process.command_line": "hunter2"})
    monkeypatch.setattr(resources.ProcessResourceDetector, "detect", lambda _: found)
    monkeypatch.setenv("OTEL_EXPERIMENTAL_RESOURCE_DETECTORS", detectors)
    base = server.url.removesuffix("/v1/traces")
    with torchotel.instrument(endpoint=base, record=tmp_path / "run", metrics_exporter="prometheus,otlp") as handle:
        train()
        target = scrape(handle.prometheus_port).target
    sent = [one.message.SerializeToString() for one in server.requests]
    sent += [one.message.SerializeToString() for one in server.pushed]
    written = [file.read_bytes() for file in (tmp_path / "run").iterdir()]
    assert sent
    assert written
    assert not any(b"hunter2" in data for data in (*sent, *written, str(target).encode()))
