"""Test `torchotel run`: an unmodified program is recorded, and its exit code is passed on."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import commands
from support.otlp_http_receiver import Answer, receiver

from torchotel.runs import Run, open_run

pytestmark = pytest.mark.program

TORCHOTEL = ("-m", "torchotel")
SCRIPT = """
import os, signal, sys
import torch
from torch.utils.data import DataLoader, TensorDataset

class Net(torch.nn.Sequential):
    pass

def main(way):
    # A job in a shell's background has it ignored, and a child inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    net = Net(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = TensorDataset(torch.ones(12, 4))
    method = way if way in ("fork", "spawn") else None
    loader = DataLoader(data, 4, num_workers=1 if method else 0, multiprocessing_context=method)
    while True:
        for (batch,) in loader:
            optimizer.zero_grad()
            net(batch).sum().backward()
            optimizer.step()
        print("epoch", flush=True)
        if way != "forever":
            break
    os.chdir("/")
    if way == "fail":
        sys.exit(5)
    if way == "child":
        child = os.fork()
        if child == 0:
            sys.exit(7)
        print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

if __name__ == "__main__":
    main(sys.argv[1])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def _only_run(folder: Path) -> Run:
    (path,) = (folder / "torchotel-runs").iterdir()
    assert path.name.endswith("-train")
    return open_run(path)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_records_a_program_with_loader_workers(folder: Path, method: str) -> None:
    done = commands.torchotel("run", "train.py", method, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    run = _only_run(folder)
    assert [unit.kind for unit in run.records()] == ["step"] * 3
    assert run.info["finished"] is True
    assert run.info["service_name"] == "train"
    paths = {span.attributes.get("torch.module.path") for span in run.spans()}
    assert paths == {None, "Net", "0", "1", "2"}
    assert done.stdout.startswith("epoch\n\nrun ")
    assert "steps       3, 3 of them in detail" in done.stdout
    assert f"\n  torchotel summary torchotel-runs/{run.folder.name} " in done.stdout


def test_runs_a_module_and_takes_its_options_before_it(folder: Path) -> None:
    done = commands.forked_python(
        *TORCHOTEL, "run", "--detail", "off", "--record", "here", "-m", "train", "plain", cwd=folder, **commands.SILENT
    )
    assert done.returncode == 0
    run = open_run(folder / "here")
    assert [unit.detailed for unit in run.records()] == [False] * 3
    assert "no step was recorded in detail" in done.stdout


@pytest.mark.parametrize("words", [["-m", "pkg.mod"], ["-m", "pkg"], ["pkg"], ["pkg/mod.py"]], ids=" ".join)
def test_names_the_service_as_the_folder(folder: Path, words: list[str]) -> None:
    """A module's service name is its full name, since names like `train` and `main` are common."""
    (folder / "pkg").mkdir()
    for name in ("mod", "__main__"):
        (folder / "pkg" / f"{name}.py").write_text(SCRIPT)
    done = commands.forked_python(*TORCHOTEL, "run", *words, "plain", cwd=folder, **commands.SILENT)
    assert (done.returncode, done.stderr) == (0, "")
    (path,) = (folder / "torchotel-runs").iterdir()
    name = words[-1].removeprefix("pkg/").removesuffix(".py")
    assert path.name.endswith(f"-{name}")
    assert open_run(path).info["service_name"] == name


@pytest.mark.parametrize(
    ("words", "name"), [(["-m", "pkg.mod"], "pkg.mod"), (["-m", "cProfile", "-o", "profile", "pkg/mod.py"], "mod")]
)
def test_names_the_service_of_a_program_that_instruments_itself(folder: Path, words: list[str], name: str) -> None:
    """The service name is the program's own under the command, and not that of a profiler."""
    (folder / "pkg").mkdir()
    (folder / "pkg" / "mod.py").write_text(f"import torchotel\ntorchotel.instrument(record='run')\n{SCRIPT}")
    done = commands.python(*words, "plain", cwd=folder, **commands.SILENT)
    assert (done.returncode, done.stderr) == (0, "")
    assert open_run(folder / "run").info["service_name"] == name


def test_passes_the_exit_code_on_and_still_sums_up(folder: Path) -> None:
    done = commands.forked_python(*TORCHOTEL, "run", "train.py", "fail", cwd=folder, **commands.SILENT)
    assert done.returncode == 5
    assert "slowest layers, backward" in done.stdout
    assert re.search(r"ended with +SystemExit after step 2\n +5\n", commands.torchotel("summary", cwd=folder).stdout)


def test_names_the_exception_behind_an_exit(folder: Path) -> None:
    """The summary names the exception if its handler in the program calls `sys.exit`."""
    text = SCRIPT + "\ntry:\n    int('bad')\nexcept ValueError:\n    sys.exit(3)\n"
    (folder / "handles.py").write_text(text)
    done = commands.forked_python(*TORCHOTEL, "run", "handles.py", "plain", cwd=folder, **commands.SILENT)
    assert done.returncode == 3
    assert "the program ended with ValueError after step 2" in done.stdout


def test_says_that_a_program_failed_before_its_first_step(folder: Path) -> None:
    """The next `torchotel summary` shows an older run, so the message says that there is no new one."""
    (folder / "early.py").write_text("import torch\n1 / 0\n")
    done = commands.forked_python(*TORCHOTEL, "run", "early.py", cwd=folder, **commands.SILENT)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith(
        "ZeroDivisionError: division by zero\n"
        "torchotel: no training step and no evaluation was seen, so nothing was recorded.\n"
    )


def test_says_only_what_went_wrong_where_it_is_to_be_quiet(folder: Path) -> None:
    """With --quiet the run is recorded, and spans that were not accepted are reported on standard error."""
    quiet = ["run", "--quiet", "--record"]
    done = commands.forked_python(*TORCHOTEL, *quiet, "well", "train.py", "plain", cwd=folder, **commands.SILENT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "epoch\n", "")
    assert len(list(open_run(folder / "well").records())) == 3
    with receiver() as server:
        server.answers.extend([Answer(400)] * 10)
        endpoint = server.url.removesuffix("/v1/traces")
        words = [*quiet, "lost", "--endpoint", endpoint, "train.py", "plain"]
        done = commands.forked_python(*TORCHOTEL, *words, cwd=folder, OTEL_TRACES_EXPORTER="otlp")
    assert (done.returncode, done.stdout) == (0, "epoch\n")
    again = f"To send them to a server: torchotel export lost --to {endpoint}"
    assert re.search(rf"\d+ spans did not reach {endpoint}; the recording has them. {again}\n", done.stderr)


def test_names_a_trace_that_was_sent(folder: Path) -> None:
    """The output names the trace of a step with layers, to search for in Jaeger."""
    with receiver() as server:
        endpoint = server.url.removesuffix("/v1/traces")
        done = commands.forked_python(
            *TORCHOTEL, *("run", "--endpoint", endpoint, "train.py", "plain"), cwd=folder, OTEL_TRACES_EXPORTER="otlp"
        )
        sent = server.spans
    (named,) = re.findall(r"  trace (\w+) is step 2, with its layers\n", done.stdout)
    assert f"{len(sent)} spans sent to {server.url}\n" in done.stdout
    names = {span.name for span in sent if span.trace_id.hex() == named}
    assert {"torch.step", "forward 0"} <= names
    assert done.stderr == ""


def test_says_which_flags_the_program_overruled(folder: Path) -> None:
    """Flags that the program's instrument() overrides are named; flags with the same value are not."""
    says = "instrument(detail='off', record='mine', run_id='x', headers={'key': 'hidden'})"
    (folder / "says.py").write_text(f"import torchotel\ntorchotel.{says}\n{SCRIPT}")
    flags = ["--detail", "all", "--headers", "key=other", "--run-id", "x", "--no-shapes"]
    done = commands.forked_python(*TORCHOTEL, "run", *flags, "says.py", "plain", cwd=folder, **commands.SILENT)
    told = "the program's call of instrument() overrides options: headers over --headers, detail='off' over --detail"
    assert (done.returncode, done.stderr) == (0, f"torchotel: {told}\n")
    assert "\nrecorded in mine\n  torchotel report mine " in done.stdout
    assert [unit.detailed for unit in open_run(folder / "mine").records()] == [False] * 3


@pytest.mark.parametrize(
    ("does", "printed"),
    [
        ("main('plain')", "epoch\n"),
        ("with contextlib.suppress(RuntimeError): torch.nn.Linear(2, 2)(torch.ones(3))", ""),
    ],
    ids=["steps", "a failed forward"],
)
def test_says_where_the_program_took_its_recording_away(folder: Path, does: str, printed: str) -> None:
    """If the program deletes its recording, the message says so, not that nothing was recorded."""
    body, _, _ = SCRIPT.partition("if __name__")
    says = f"import contextlib, shutil, torchotel\nwith torchotel.instrument(record='mine'):\n    {does}\n"
    (folder / "says.py").write_text(f"{body}{says}shutil.rmtree({str(folder / 'mine')!r})\n")
    done = commands.forked_python(*TORCHOTEL, "run", "says.py", cwd=folder, **commands.SILENT)
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        printed,
        "torchotel: mine: the recording no longer exists\n",
    )


def test_explains_a_recording_that_cannot_be_read(folder: Path) -> None:
    """A damaged recording causes one line without a traceback; the exit code is the program's."""
    body, _, _ = SCRIPT.partition("if __name__")
    spoils = "import torchotel\nwith torchotel.instrument(record='mine'):\n    main('plain')\n"
    lines = (
        f"with open({str(folder / 'mine' / 'metrics.jsonl')!r}, 'a') as file:\n    file.write('no JSON\\n{{}}\\n')\n"
    )
    (folder / "spoils.py").write_text(f"{body}{spoils}{lines}")
    done = commands.forked_python(*TORCHOTEL, "run", "spoils.py", cwd=folder, **commands.SILENT)
    assert (done.returncode, done.stdout) == (0, "epoch\n")
    assert done.stderr.startswith("torchotel: the recording cannot be summarised: ")
    assert "metrics.jsonl: line 4 is no JSON object" in done.stderr
    assert done.stderr.count("\n") == 1


def test_sums_up_once_where_the_program_forks(folder: Path) -> None:
    done = commands.torchotel("run", "train.py", "child", cwd=folder)
    assert done.returncode == 0
    assert "child 7\n" in done.stdout
    assert done.stdout.count("recorded in") == 1


def test_sums_up_after_an_interrupt(folder: Path) -> None:
    command = [sys.executable, "-m", "torchotel", "run", "--record", "here", "train.py", "forever"]
    with subprocess.Popen(
        command, cwd=folder, env=commands.environment(**commands.SILENT), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"epoch\n"
        process.send_signal(signal.SIGINT)
        try:
            output, errors = process.communicate(timeout=commands.TIMEOUT_S)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGINT
    assert b"KeyboardInterrupt" in errors
    assert b"slowest layers, forward" in output
    assert open_run(folder / "here").info["finished"] is True


def test_runs_the_program_plainly_where_telemetry_is_disabled(folder: Path) -> None:
    done = commands.forked_python(
        *TORCHOTEL, "run", "train.py", "plain", cwd=folder, OTEL_SDK_DISABLED="true", **commands.SILENT
    )
    assert (done.returncode, done.stdout) == (0, "epoch\n")
    assert done.stderr.startswith("torchotel: nothing was recorded: OTEL_SDK_DISABLED")
    assert done.stderr.count("\n") == 1
    assert not (folder / "torchotel-runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no script given"),
        (["absent.py"], "cannot read the script 'absent.py'; name a readable script, or a module with -m"),
        (["--detail", "some", "train.py"], "detail (from --detail): got 'some', takes"),
        (["--protocol", "http/json", "train.py"], "protocol (from --protocol): got 'http/json', takes"),
        (["--endpoint", "host:4318", "train.py"], "endpoint (from --endpoint): got 'host:4318', takes"),
        (["--record", "train.py", "train.py"], "record (from --record): got 'train.py', takes"),
        (["--frequency", "3", "train.py"], "usage: torchotel"),
    ],
)
def test_names_a_wrong_use(folder: Path, words: list[str], message: str) -> None:
    done = commands.torchotel("run", *words, cwd=folder)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_names_a_wrong_variable(folder: Path) -> None:
    done = commands.torchotel("run", "train.py", cwd=folder, TORCHOTEL_DETAIL="some")
    assert done.returncode == 2
    assert "detail (from TORCHOTEL_DETAIL): got 'some'" in done.stderr
