"""`opentelemetry-instrument python train.py`: a program that knows nothing of torchotel is instrumented."""

import signal
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from support import commands
from support.otlp_http_receiver import Receiver

import torchotel
from torchotel._lifecycle import LIFECYCLE
from torchotel.instrumentor import TorchInstrumentor
from torchotel.runs import open_run

pytestmark = pytest.mark.program

COMMAND = Path(sys.executable).with_name("opentelemetry-instrument")

WITHOUT_DISTRO = {"OTEL_PYTHON_DISTRO": "none", "OTEL_PYTHON_CONFIGURATOR": "none"}
"""opentelemetry-distro is installed here; by other names than its own nothing is configured, as without it."""
DISTRO = {"OTEL_PYTHON_DISTRO": "distro", "OTEL_PYTHON_CONFIGURATOR": "configurator"}

TRAIN = """
import sys
import torch

def train(steps):
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()

if __name__ == "__main__":
    train(3)
    print("trained", sys.argv[1:])
"""


def _instrument(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    silent = {"OTEL_METRICS_EXPORTER": "none", "OTEL_LOGS_EXPORTER": "none"}
    return subprocess.run(
        [COMMAND, sys.executable, *words],
        cwd=folder,
        env=commands.environment(**{**commands.SILENT, **silent, **WITHOUT_DISTRO, **variables}),
        capture_output=True,
        text=True,
        timeout=commands.TIMEOUT_S,
        check=False,
    )


def _said(done: subprocess.CompletedProcess[str]) -> str:
    """Give what was said on standard error, but for the configurator that is not there."""
    return "".join(line for line in done.stderr.splitlines(keepends=True) if "configurator not loaded" not in line)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


@pytest.mark.parametrize("words", [["train.py"], ["-m", "train"]])
def test_sends_the_steps_of_a_script_and_a_module(folder: Path, server: Receiver, words: list[str]) -> None:
    endpoint = server.url.removesuffix("/v1/traces")
    done = _instrument(
        folder, *words, "--epochs", "3", OTEL_TRACES_EXPORTER="otlp", OTEL_EXPORTER_OTLP_ENDPOINT=endpoint
    )
    assert (done.returncode, done.stdout, _said(done)) == (0, "trained ['--epochs', '3']\n", "")
    names = Counter(span.name for span in server.spans)
    assert names["torch.step"] == names["forward Linear"] == names["backward Linear"] == 3


def test_replays_through_the_provider_of_the_distro(folder: Path) -> None:
    done = _instrument(folder, "train.py", OTEL_TRACES_EXPORTER="console", **DISTRO)
    assert (done.returncode, _said(done)) == (0, "")
    assert done.stdout.count('"name": "torch.step"') == 3
    assert done.stdout.count('"telemetry.auto.version"') >= 3  # of the resource that the configurator makes


def test_costs_a_program_without_torch_nothing(folder: Path) -> None:
    (folder / "plain.py").write_text(
        "import importlib.util, sys\n"
        "assert importlib.util.find_spec('torch')\n"
        "print([name for name in ('torch', 'torchotel._handle') if name in sys.modules], 'torchotel' in sys.modules)\n"
    )
    done = _instrument(folder, "plain.py")
    assert (done.stdout, _said(done)) == ("[] True\n", "")


@pytest.mark.parametrize(
    "variables", [{"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "requests, torchotel"}, {"OTEL_SDK_DISABLED": "true"}]
)
def test_stays_out_where_it_is_disabled(folder: Path, variables: dict[str, str]) -> None:
    (folder / "look.py").write_text("import sys, torch\nprint('torchotel._handle' in sys.modules)\n")
    done = _instrument(folder, "look.py", **variables)
    assert (done.stdout, _said(done)) == ("False\n", "")


@pytest.mark.parametrize("around", [WITHOUT_DISTRO, DISTRO], ids=["without distro", "with distro"])
@pytest.mark.parametrize(
    "variables",
    [{"TORCHOTEL_DETAIL": "some"}, {"TORCHOTEL_RECORD": "nowhere/train.py/folder"}],
    ids=["checked before", "found out when torch is there"],
)
def test_says_a_bad_variable_once_and_runs_the_program(
    folder: Path, variables: dict[str, str], around: dict[str, str]
) -> None:
    """On standard error itself: the instrumentation of logging takes what is logged away from there."""
    (folder / "nowhere").symlink_to(folder)
    done = _instrument(folder, "train.py", **around, **variables)
    assert (done.returncode, done.stdout) == (0, "trained []\n")
    (line,) = _said(done).splitlines()
    assert line.startswith("torchotel: ")
    assert ": got " in line
    assert line.endswith(". Nothing is instrumented.")


@pytest.mark.parametrize("imports", ["import torch, torchotel", "import torchotel"], ids=["torch", "torchotel"])
def test_lets_the_program_say_otherwise_before_its_first_step(folder: Path, imports: str) -> None:
    """Whichever is imported first; what the program leaves open is as the variables say."""
    script = folder / "says.py"
    script.write_text(f"{imports}\ntorchotel.instrument(record='mine', detail='off')\n{TRAIN}")
    done = _instrument(folder, "says.py", TORCHOTEL_RECORD="theirs", TORCHOTEL_RUN_ID="seven")
    assert (done.returncode, _said(done)) == (0, "")
    assert not (folder / "theirs").exists()
    run = open_run(folder / "mine")
    assert [(unit.kind, unit.detailed) for unit in run.records()] == [("step", False)] * 3
    assert run.info["run_id"] == "seven"


PROCESSES = """
import multiprocessing, os, sys
from train import train
import torch
from torch.utils.data import DataLoader

class Where(torch.utils.data.Dataset):
    def __len__(self):
        return 1
    def __getitem__(self, index):
        train(1)
        return running()

def running():
    lifecycle = sys.modules.get("torchotel._lifecycle")
    return lifecycle is not None and lifecycle.LIFECYCLE.session is not None

def report(method):
    train(1)
    print(method, running(), flush=True)

if __name__ == "__main__":
    for method in ("spawn", "fork", "forkserver"):
        process = multiprocessing.get_context(method).Process(target=report, args=(method,))
        process.start()
        process.join()
    child = os.fork()
    if child == 0:
        report("child")
        os._exit(0)
    os.waitpid(child, 0)
    for method in ("fork", "spawn"):
        print("loader", method, *DataLoader(Where(), num_workers=1, multiprocessing_context=method, collate_fn=all))
    report("main")
"""


def test_goes_into_new_processes_and_not_into_forked_ones(folder: Path) -> None:
    """A spawned process is a python of its own, and so instrumented; a loader's workers are not."""
    (folder / "processes.py").write_text(PROCESSES)
    done = _instrument(folder, "processes.py")
    assert _said(done) == ""
    assert done.stdout.splitlines() == [
        "spawn True",
        "fork False",
        "forkserver False",
        "child False",
        "loader fork False",
        "loader spawn False",
        "main True",
    ]


def test_instruments_the_ranks_of_torchrun_and_not_the_launcher(folder: Path) -> None:
    """Each rank has its run; the launcher imports torch, too, and leaves nothing."""
    done = _instrument(
        folder,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--master-port=0",
        "train.py",
        TORCHOTEL_RECORD="run",
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained []\n" * 2
    assert sorted(path.name for path in folder.glob("run/*")) == ["rank0", "rank1"]
    for rank in (0, 1):
        assert len(list(open_run(folder / "run" / f"rank{rank}").records())) == 3


SPAWNS = """
import sys
from train import train
from torch.multiprocessing.spawn import spawn
def rank(number):
    train(3)
if __name__ == "__main__":
    spawn(rank, (), int(sys.argv[1]))
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_records_what_multiprocessing_spawns(folder: Path, processes: int) -> None:
    """Each process has a folder of its own, and all have one run id; the process that spawns them leaves no folder."""
    (folder / "spawns.py").write_text(SPAWNS)
    done = _instrument(folder, "spawns.py", str(processes), TORCHOTEL_RECORD="run")
    assert done.returncode == 0, done.stderr
    runs = [open_run(path) for path in folder.glob("run*")]
    assert [len(list(run.records())) for run in runs] == [3] * processes
    assert len({run.info["run_id"] for run in runs}) == 1


INTERRUPTED = """
import signal
from torchotel import _auto_instrument
settings = {"prometheus_port": 0, "endpoint": "http://127.0.0.1:1"}
_auto_instrument.start_with_torch(settings, defer_start=True, failed=print)
from train import train
import torch
torch.nn.Linear(4, 1)(torch.ones(2, 4)).sum().backward()
signal.raise_signal(signal.SIGINT)
"""


def test_an_interrupt_in_the_first_step_ends_the_program_as_ever(folder: Path) -> None:
    """The worker opens the port at the interpreter's end, and this does not change the exit code."""
    (folder / "interrupted.py").write_text(INTERRUPTED)
    done = commands.python("interrupted.py", cwd=folder)
    assert done.returncode == -signal.SIGINT, done.stderr


def test_instruments_and_stops_when_called_by_the_program(folder: Path) -> None:
    (folder / "calls.py").write_text(
        "import sys\n"
        "from torchotel.instrumentor import TorchInstrumentor\n"
        "TorchInstrumentor().instrument(record='never')\n"
        "TorchInstrumentor().uninstrument()\n"
        "from train import train\n"
        "train(1)\n"
        "assert 'torchotel._handle' not in sys.modules\n"
        "TorchInstrumentor().instrument(record='some')\n"
        "train(2)\n"
        "TorchInstrumentor().uninstrument()\n"
        "train(1)\n"
    )
    done = commands.python("calls.py", cwd=folder, **commands.SILENT)
    assert (done.returncode, done.stderr) == (0, "")
    assert not (folder / "never").exists()
    assert len(list(open_run(folder / "some").records())) == 2


@pytest.mark.parametrize("model", [None, torch.nn.Linear(1, 1)], ids=["no model", "a model"])
def test_opens_its_port_at_once_where_the_program_asks_for_it_itself(
    monkeypatch: pytest.MonkeyPatch, model: torch.nn.Module | None
) -> None:
    """By itself it waits for a step: the process may be a launcher."""
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    TorchInstrumentor().instrument(detail="off")
    try:
        running = LIFECYCLE.session
        assert running is not None
        assert running.prometheus_port is None
        port = torchotel.instrument(model).prometheus_port
        assert port is not None
        assert torchotel.instrument().prometheus_port == port
    finally:
        TorchInstrumentor().uninstrument()


def test_goes_on_without_an_argument_that_is_for_other_instrumentors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who instruments all there is hands the same arguments to each."""
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    TorchInstrumentor().instrument(detail="off", logger_provider=None, excluded_urls="")
    try:
        running = LIFECYCLE.session
        assert running is not None
        assert [record.getMessage() for record in caplog.records] == [
            "torchotel has no setting logger_provider and excluded_urls: ignored"
        ]
    finally:
        TorchInstrumentor().uninstrument()


def test_goes_into_each_supported_torch() -> None:
    """Those of NVIDIA's containers are called pre-releases; pip must not put another in their place."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (required,) = [text for text in project["dependencies"] if text.startswith("torch>")]
    named = [required, *project["optional-dependencies"]["instruments"]]
    for text in [*named, *TorchInstrumentor().instrumentation_dependencies()]:
        taken = Requirement(text).specifier  # as OpenTelemetry's loader asks
        versions = ("2.9.0", "2.9.0a0+50eac811a6.nv25.09", "2.10.0a0+1", "2.8.0")
        assert [taken.contains(version) for version in versions] == [True, True, True, False]
