"""The programs that people copy from, run as they are."""

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from support import commands
from support.otlp_http_receiver import receiver
from support.recorded_training import Seen, roots

from torchotel.runs.reader import open_run

pytestmark = pytest.mark.program

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(folder: Path, name: str, *arguments: str, **environment: str) -> list[str]:
    """Run an example from a folder of its own and give the lines that it printed; it must say nothing else."""
    done = commands.forked_python(str(EXAMPLES / name), *arguments, cwd=folder, **environment)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def run_and_receive(folder: Path, name: str) -> tuple[list[str], list[Seen]]:
    """Run an example that exports, and give the lines that it printed and the traces that came."""
    pytest.importorskip("sklearn")
    with receiver() as server:
        lines = run(folder, name, OTEL_EXPORTER_OTLP_ENDPOINT=server.url.removesuffix("/v1/traces"))
    return lines, [root for root in roots(server.spans) if root.name != "torch.run"]


def test_mnist_net(tmp_path: Path) -> None:
    """Prints a step's tree: layers in the order of the calls, then in reverse, all with a time."""
    lines = run(tmp_path, "mnist_net.py")
    assert [line[:40].rstrip() for line in lines] == [
        "torch.step",
        "  torch.between",
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
    """Twenty steps reach an endpoint that only a variable names, twelve of them in detail."""
    with receiver() as server:
        lines = run(tmp_path, "three_lines.py", OTEL_EXPORTER_OTLP_ENDPOINT=server.url.removesuffix("/v1/traces"))
    assert lines == [f"20 steps, {len(server.spans)} spans"]
    names = Counter(span.name for span in server.spans)
    assert (names["torch.step"], names["torch.backward"], names["forward 0"], names["backward 0"]) == (20, 20, 12, 12)


def test_digits_resnet(tmp_path: Path) -> None:
    """Trains on real images, and the run folder that a variable asks for holds its steps and evaluations."""
    for needed in ("torchvision", "sklearn", "rich"):
        pytest.importorskip(needed)
    sizes = ("--epochs", "1", "--image-size", "16", "--batch-size", "256", "--workers", "1")
    lines = run(tmp_path, "digits_resnet.py", *sizes, OTEL_TRACES_EXPORTER="none", TORCHOTEL_RECORD="run")
    assert 0 <= float(lines[-1].removeprefix("test accuracy ").removesuffix("%")) <= 100
    recorded = open_run(tmp_path / "run")
    units = list(recorded.records())
    assert Counter(unit.kind for unit in units) == {"step": 5, "evaluation": 3, "log": 1}
    assert {"loss", "lr", "accuracy", "epoch", "samples"} == set(units[0].values)
    assert set(units[-1].values) == {"test_accuracy"}
    assert recorded.info["model"]["name"] == "ResNet"


def test_gan(tmp_path: Path) -> None:
    """One step for each batch: three forwards and backwards, two optimizer steps, and both models in it."""
    lines, traces = run_and_receive(tmp_path, "gan.py")
    assert lines[0].startswith("45 batches, 45 steps, ")
    assert [trace.attributes["torch.step.number"] for trace in traces] == list(range(45))
    phases = ["torch.forward", "torch.backward"]
    both = [*phases, *phases, "torch.optimizer.step", *phases, "torch.optimizer.step"]
    loads = "torch.between", "torch.data"
    for trace in traces:  # the first of an epoch waits for its iterator too
        assert [child.name for child in trace.children if child.name not in loads] == both
    discriminated = _calls(traces[3], "forward Sequential", "discriminator")
    assert [call.attributes["torch.call.index"] for call in discriminated] == [0, 1, 2]
    generated = _calls(traces[3], "backward Sequential", "generator")
    assert [call.parent.name for call in generated if call.parent] == ["torch.backward"]
    assert {"torch.loss", "torch.log.discriminator_loss"} < set(traces[3].attributes)


def _calls(trace: Seen, name: str, model: str) -> list[Seen]:
    return [call for call in trace.find_all(name) if call.attributes["torch.model"] == model]


def test_accumulate_amp(tmp_path: Path) -> None:
    """A step takes four batches, layers ran in autocast's dtype, and the norm is the one before clipping, unscaled."""
    pytest.importorskip("sklearn")
    with receiver() as server:
        endpoint = server.url.removesuffix("/v1/traces")
        lines = run(tmp_path, "accumulate_amp.py", OTEL_EXPORTER_OTLP_ENDPOINT=endpoint)
    steps = [root for root in roots(server.spans) if root.name == "torch.step"]
    assert (len(steps), lines[0]) == (14, "14 steps of 128 samples")
    names = Counter(child.name for child in steps[1].children)
    assert (names["torch.forward"], names["torch.backward"], names["torch.optimizer.step"]) == (4, 4, 1)
    dtypes = [call.attributes["torch.output.dtypes"] for call in steps[1].find_all("forward 0")]
    assert dtypes in ([["bfloat16"]] * 4, [["float16"]] * 4)
    recorded, returned = lines[1].removeprefix("gradient norm recorded ").split(", by clip_grad_norm_ ")
    assert float(recorded) == pytest.approx(float(returned), rel=1e-4)
    assert float(recorded) == pytest.approx(steps[-1].attributes["torch.gradient.norm"], rel=1e-4)


def test_own_provider(tmp_path: Path) -> None:
    """The sampler left evaluations out, and the processor wrote on each span; nothing else is missing."""
    lines, traces = run_and_receive(tmp_path, "own_provider.py")
    assert lines[0] == "24 steps, 6 evaluations"
    assert Counter(trace.name for trace in traces) == {"torch.step": 24}
    assert {span.attributes["team"] for trace in traces for span in trace.walk()} == {"digits"}
    n_spans = sum(1 for trace in traces for _ in trace.walk()) + 1  # that of the run
    exported, left_out = lines[1].removesuffix(" sampled out").split(" spans exported, ")
    assert int(exported) == n_spans
    assert int(left_out) > 0


def test_own_steps(tmp_path: Path) -> None:
    """Each iteration is one step with all that it did, and the policy learned."""
    lines, traces = run_and_receive(tmp_path, "own_steps.py")
    assert lines[0] == "60 iterations, 60 steps, 0 evaluations"
    assert [trace.attributes["torch.log.iteration"] for trace in traces] == list(range(60))
    update = ["torch.forward", "torch.backward", "torch.optimizer.step"]
    assert [child.name for child in traces[0].children] == update * 4
    assert all([child.name for child in trace.children] == ["torch.between", *update * 4] for trace in traces[1:])
    assert len(traces[0].find_all("forward Sequential")) == 5
    assert traces[0].attributes["torch.log.reward"] < 0.3
    assert traces[-1].attributes["torch.log.reward"] > 0.9


def post(url: str, value: Any, **headers: str) -> tuple[int, Any]:
    """Post JSON, and give the status and the answer."""
    request = Request(url, json.dumps(value).encode(), {"Content-Type": "application/json", **headers})  # noqa: S310  # http, printed by our own child
    try:
        with urlopen(request, timeout=30) as answer:  # noqa: S310  # http, to a server of the tests
            return answer.status, json.load(answer)
    except HTTPError as refused:
        return refused.code, json.load(refused)


def test_serve(tmp_path: Path) -> None:
    """A request's span has the model's layers below it, in the caller's trace, and all is sent when it stops."""
    pytest.importorskip("fastapi")
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    trace_id, caller = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with receiver() as server:
        environment = commands.environment(OTEL_EXPORTER_OTLP_ENDPOINT=server.url.removesuffix("/v1/traces"))
        command = [sys.executable, str(EXAMPLES / "serve.py"), "--port", "0"]
        serving = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
        with serving:
            assert serving.stdout is not None
            url = serving.stdout.readline().strip()
            traceparent = f"00-{trace_id}-{caller}-01"
            answers = [post(url, digits.data[i].tolist(), traceparent=traceparent) for i in range(3)]
            refused, _ = post(url, [1, 2])
            serving.send_signal(signal.SIGINT)
            rest = serving.stdout.read()
    assert (serving.returncode, rest, refused) == (0, "stopped\n", 422)
    assert answers == [(200, {"digit": int(digit)}) for digit in digits.target[:3]]
    spans = [Seen(span) for span in server.spans if span.trace_id.hex() == trace_id]
    by_id = {span.span.span_id.hex(): span for span in spans}
    above = {(span.name, getattr(by_id.get(span.span.parent_span_id.hex()), "name", "")) for span in spans}
    assert above == {
        ("POST /predict", ""),
        ("torch.evaluation", "POST /predict"),
        ("forward Net", "torch.evaluation"),
        ("forward hidden", "forward Net"),
        ("forward scores", "forward Net"),
    }
    asked = [span for span in spans if span.name == "POST /predict"]
    assert [span.span.parent_span_id.hex() for span in asked] == [caller] * 3
    (wrong,) = [span for span in map(Seen, server.spans) if span.attributes.get("http.status_code") == 422]
    assert wrong.span.trace_id.hex() != trace_id
