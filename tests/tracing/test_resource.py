"""What the resource says of the process, and who has the last word."""

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from support import commands
from support.scraped_metrics import scrape

import torchotel
from torchotel._limits import MAX_NAME
from torchotel._utils.installation import package_version
from torchotel.exporters.prometheus.exposition import target_labels
from torchotel.tracing.resource import describe_process


@pytest.mark.parametrize(
    ("variable", "given", "name"),
    [
        ("", None, "train"),
        ("service.name=resnet", None, "resnet"),
        ("service.name=resnet", "mine", "mine"),
        ("service.name=unknown_service_x", None, "unknown_service_x"),
        ("service.name=%20", None, "train"),
    ],
)
def test_service_name(monkeypatch: pytest.MonkeyPatch, variable: str, given: str | None, name: str) -> None:
    """A given name wins over that of OTEL_RESOURCE_ATTRIBUTES, and that over the script's."""
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", variable)
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    assert describe_process(given, "train", {})["service.name"] == name


def test_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container whose own name says nothing the variable names the host."""
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "host.name=node-7")
    assert describe_process(None, "train", {})["host.name"] == "node-7"


def test_attributes_of_the_variable_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The specification exempts the resource from limits; only labels of a scrape are cut."""
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", f"note={'x' * 3000}")
    described = describe_process(None, "train", {})
    assert described["note"] == "x" * 3000
    assert len(target_labels(described)["note"]) == MAX_NAME


def test_reserved_attributes_of_the_variable_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning names those that torchotel sets itself; the others apply."""
    variable = "torch.run.id=mine, process.pid=1,team=vision,torch.version=0,telemetry.sdk.name=x,service.name=y"
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", variable)
    described = describe_process("z", "train", {"torch.version": "2"})
    assert (described["team"], described["torch.version"], described["process.pid"]) == ("vision", "2", os.getpid())
    (warning,) = caplog.messages
    assert "process.pid, telemetry.sdk.name, torch.run.id, torch.version" in warning


SHOWN = """
import json
from opentelemetry.sdk.trace import TracerProvider
attributes = TracerProvider().resource.attributes
print(json.dumps({name: value for name, value in attributes.items() if name.startswith("torch.")}))
import torch, torchotel
torchotel.instrument(record="run")
torch.nn.Linear(1, 1)(torch.ones(1)).backward()
"""


def _detected(folder: Path, **variables: str) -> dict[str, Any]:
    """Give what the detector adds in an SDK; the entry point is that of pyproject.toml, installed or not yet."""
    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["entry-points"]
    group = "opentelemetry_resource_detector"
    metadata = folder / "declared-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: declared\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\ntorchotel = {declared[group]['torchotel']}\n")
    detectors = {"OTEL_EXPERIMENTAL_RESOURCE_DETECTORS": "torchotel", "PYTHONPATH": str(folder)}
    done = commands.python("-c", SHOWN, cwd=folder, **detectors, **commands.SILENT, **variables)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.program
def test_a_detector_gives_the_identity_to_any_sdk(tmp_path: Path) -> None:
    """Under a launcher its variables, before torch is imported."""
    launched = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "job-7"}
    assert _detected(tmp_path, **launched) == {
        "torch.rank": 3,
        "torch.local_rank": 1,
        "torch.world_size": 4,
        "torch.run.id": "job-7",
        "torch.run.generation": 0,
    }


@pytest.mark.program
def test_a_detector_and_the_recording_agree_on_the_run_id(tmp_path: Path) -> None:
    """Also where a process draws its own."""
    found = _detected(tmp_path)
    described = json.loads((tmp_path / "run" / "run.json").read_text())
    assert described["resource"].items() >= found.items()
    assert described["run_id"] == found["torch.run.id"]


def test_the_sdk_is_torchotel_wherever_the_resource_is_told(tmp_path: Path) -> None:
    """The name `opentelemetry` is reserved for OpenTelemetry's SDKs."""
    with torchotel.instrument(record=tmp_path / "run", traces_exporter="none") as handle:
        with torchotel.step():
            torch.nn.Linear(1, 1)(torch.ones(1)).backward()
        handle.flush()
        text = scrape(handle.prometheus_port).text
    told = json.loads((tmp_path / "run" / "run.json").read_text())["resource"]
    version = package_version()
    assert (told["telemetry.sdk.name"], told["telemetry.sdk.version"]) == ("torchotel", version)
    (line,) = (line for line in text.splitlines() if line.startswith("target_info{"))
    assert f'telemetry_sdk_name="torchotel",telemetry_sdk_version="{version}"' in line


def test_a_blank_service_name_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "  ")
    assert describe_process(None, "train", {})["service.name"] == "train"
