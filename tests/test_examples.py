"""The programs that people copy from, run as they are."""

from collections import Counter
from pathlib import Path

import commands
import pytest
from receiver import receiver

from torchotel.report.read import open_run

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(folder: Path, name: str, *arguments: str, **environment: str) -> list[str]:
    """Run an example from a folder of its own and give the lines that it printed; it must say nothing else."""
    done = commands.python(str(EXAMPLES / name), *arguments, cwd=folder, **environment)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_mnist_net(tmp_path: Path) -> None:
    """Prints a step's tree: layers in the order of the calls, then in reverse, all with a time."""
    lines = run(tmp_path, "mnist_net.py")
    assert [line[:40].rstrip() for line in lines] == [
        "torch.step",
        "  torch.forward",
        "    forward Net",
        "      forward conv1",
        "      forward conv2",
        "      forward dropout1",
        "      forward fc1",
        "      forward dropout2",
        "      forward fc2",
        "  torch.backward",
        "    backward Net",
        "      backward fc2",
        "      backward dropout2",
        "      backward fc1",
        "      backward dropout1",
        "      backward conv2",
        "      backward conv1",
        "  torch.optimizer.step",
    ]
    assert all(float(line.split()[-2]) > 0 and line.endswith(" ms") for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_resnet50_shapes(tmp_path: Path) -> None:
    """Prints the shapes that PyTorch's own documentation gives for the last layers, and that nothing changed."""
    pytest.importorskip("torchvision")
    lines = run(tmp_path, "resnet50_shapes.py")
    assert lines[:4] == [
        "forward layer3: input ('1x512x28x28',), output ('1x1024x14x14',)",
        "backward layer3: grad_output ('1x1024x14x14',), grad_input ('1x512x28x28',)",
        "forward layer4: input ('1x1024x14x14',), output ('1x2048x7x7',)",
        "backward layer4: grad_output ('1x2048x7x7',), grad_input ('1x1024x14x14',)",
    ]
    losses = lines[4].replace("loss ", "").split(", without torchotel ")
    assert losses[0] == losses[1]
    assert lines[5:] == ["162 of 162 equal bit for bit: the loss and 161 gradients"]


def test_returned_shapes(tmp_path: Path) -> None:
    """Prints three layers' inputs and outputs, shapes and dtypes, each as recorded and as returned."""
    lines = run(tmp_path, "returned_shapes.py")
    assert len(lines) == 12
    assert all(line.endswith(": equal") for line in lines)
    assert "order output shapes  recorded ('8x12x24', '1x8x24', '1x8x24')" in lines[6]


def test_three_lines(tmp_path: Path) -> None:
    """Twenty steps reach an endpoint that only a variable names, the first ten of them in detail."""
    with receiver() as server:
        lines = run(tmp_path, "three_lines.py", OTEL_EXPORTER_OTLP_ENDPOINT=server.url.removesuffix("/v1/traces"))
    assert lines == [f"20 steps, {len(server.spans)} spans"]
    names = Counter(span.name for span in server.spans)
    assert (names["torch.step"], names["torch.backward"], names["forward 0"], names["backward 0"]) == (20, 20, 10, 10)


def test_digits_resnet(tmp_path: Path) -> None:
    """Trains on real images, and the run folder that a variable asks for holds its steps and evaluations."""
    for needed in ("torchvision", "sklearn", "rich"):
        pytest.importorskip(needed)
    sizes = ("--epochs", "1", "--image-size", "16", "--batch-size", "256", "--workers", "1")
    lines = run(tmp_path, "digits_resnet.py", *sizes, OTEL_TRACES_EXPORTER="none", TORCHOTEL_RECORD="run")
    assert 0 <= float(lines[-1].removeprefix("test accuracy ").removesuffix("%")) <= 100
    recorded = open_run(tmp_path / "run")
    units = list(recorded.units())
    assert Counter(unit.kind for unit in units) == {"step": 5, "evaluation": 3, "log": 1}
    assert {"loss", "lr", "accuracy", "epoch", "samples"} == set(units[0].values)
    assert set(units[-1].values) == {"test_accuracy"}
    assert recorded.info["model"]["name"] == "ResNet"
