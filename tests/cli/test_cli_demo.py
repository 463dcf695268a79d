"""Test `torchotel demo`: a real training that learns, and its output."""

import importlib.util
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import commands

from torchotel.cli import main
from torchotel.cli.demo import find_example, listens
from torchotel.config.otlp_endpoint import OtlpEndpoint
from torchotel.runs import open_run


@pytest.fixture
def closed_port() -> Iterator[int]:
    """Reserve a port on which nothing listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.mark.program
def test_learns_the_digits_and_shows_the_run(tmp_path: Path, closed_port: int) -> None:
    endpoint = f"http://127.0.0.1:{closed_port}"
    done = commands.torchotel(
        "demo", "--record", "here", cwd=tmp_path, OTEL_TRACES_EXPORTER="otlp", OTEL_EXPORTER_OTLP_ENDPOINT=endpoint
    )
    assert (done.returncode, done.stderr) == (0, "")
    accuracy = re.search(r"test accuracy (\S+)%", done.stdout)
    assert accuracy is not None
    assert float(accuracy[1]) > 90
    assert f"Nothing listens at {endpoint}/v1/traces" in done.stdout
    assert "\nrecorded in here\n  torchotel report here " in done.stdout
    run = open_run(tmp_path / "here")
    assert run.info["model"] == {"name": "ResNet", "modules": 68, "parameters": 11_181_642}
    steps = [unit for unit in run.records() if unit.kind == "step"]
    assert len(steps) == 88
    assert sum(step.detailed for step in steps) == 11


def test_knows_whether_anything_listens(closed_port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert listens(OtlpEndpoint(f"http://{address}/v1/traces"))
        assert listens(OtlpEndpoint(address, "grpc"))
    assert not listens(OtlpEndpoint(f"http://127.0.0.1:{closed_port}"))
    assert not listens(OtlpEndpoint(f"127.0.0.1:{closed_port}", "grpc"))
    assert listens(OtlpEndpoint("unix:/nowhere", "grpc"))


def test_finds_the_example() -> None:
    assert find_example().is_file()


def test_names_the_extra_that_is_missing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sklearn" else find_spec(name))
    assert main(["demo"]) == 1
    assert capsys.readouterr().err == "the demo needs sklearn: pip install torchvision scikit-learn rich\n"


@pytest.mark.program
def test_example_names_the_extra_by_itself(tmp_path: Path) -> None:
    (tmp_path / "sklearn.py").write_text("raise ImportError('no sklearn here')")
    (tmp_path / "digits.py").write_text(find_example().read_text())
    done = commands.python("digits.py", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "no sklearn here; this example needs: pip install torchvision scikit-learn rich\n"
