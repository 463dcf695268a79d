"""The companion process exports what the thread would, and survives the training process."""

import json
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import commands, companion_program
from support.commands import environment
from support.forked_python import ForkedProgram
from support.misbehaving_servers import misbehaving, silence
from support.otlp_http_receiver import Answer, receiver

import torchotel
from torchotel.runs.reader import open_run

pytestmark = pytest.mark.program

STEPS = companion_program.STEPS
NOWHERE = "http://127.0.0.1:1"


class Run:
    """A run of the program until it has ended; the pipe of its output closes then, whatever its companion does."""

    def __init__(self, what: str, folder: Path, endpoint: str = NOWHERE, **variables: str) -> None:
        words = str(companion_program.__file__), str(folder), endpoint, what
        stdin, lines = os.pipe()
        program = ForkedProgram(words, folder.parent, environment(**variables), stdin)
        os.close(stdin)
        self.companion = os.pidfd_open(int(program.stdout.readline()))
        os.write(lines, b"\n")
        os.close(lines)
        self.code, out, self.errors = program.wait(60)
        self.lines = out.splitlines()
        self._folder = folder

    def steps(self) -> list[dict[str, Any]]:
        """Wait for the end of the companion; return the lines of the steps in the run file."""
        assert select.select([self.companion], [], [], 60)[0]
        lines = map(json.loads, (self._folder / "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if line["kind"] == "step"]

    def info(self) -> dict[str, Any]:
        """Wait for the end of the companion; return the description of the run."""
        assert select.select([self.companion], [], [], 60)[0]
        info: dict[str, Any] = json.loads((self._folder / "run.json").read_text())
        return info


def test_all_spans_reach_the_endpoint_and_the_run_file(tmp_path: Path) -> None:
    with receiver() as received:
        run = Run("nothing", tmp_path / "run", received.url.removesuffix("/v1/traces"))
    assert (run.code, run.lines) == (0, [f"{2 * STEPS} 0"]), run.errors
    assert sum(span.name.startswith("torch.step") for span in received.spans) == 2 * STEPS
    assert len(run.steps()) == 2 * STEPS
    assert run.info()["finished"]
    assert run.info()["error"] is None


def test_a_killed_training_loses_no_step(tmp_path: Path) -> None:
    """The last one has no record yet, since values may be logged to it until the next one begins: it has only phases.

    The pipes close at once, while the companion still tries an endpoint that does not respond.
    """
    with misbehaving(silence) as port:
        run = Run("kill me", tmp_path / "run", f"http://127.0.0.1:{port}")
        assert run.code == -9
        assert [step["detailed"] for step in run.steps()] == [*[True] * (STEPS - 1), False]
    assert not run.info()["finished"]
    assert run.info()["error"]["type"] == "process_ended"


def test_the_port_of_a_killed_training_closes_before_the_last_export(tmp_path: Path) -> None:
    """A scrape fails at once, as after the end of a process that served its own port."""
    with misbehaving(silence) as port:  # the companion tries to export for ten seconds
        run = Run("die with an open port", tmp_path / "run", f"http://127.0.0.1:{port}")
        (scraped,) = run.lines
        while companion_program.is_open(int(scraped)):
            pass
        assert not select.select([run.companion], [], [], 0)[0]
        signal.pidfd_send_signal(run.companion, signal.SIGKILL)


def test_a_log_filter_that_raises_costs_only_the_message(tmp_path: Path) -> None:
    """The companion's messages pass through the program's logging."""
    assert Run("break the log", tmp_path / "run").lines[0] == "True True"


def test_a_training_that_becomes_another_program_ends_its_companion(tmp_path: Path) -> None:
    run = Run("exec", tmp_path / "run")
    assert (run.code, run.lines) == (0, ["another program"])
    assert len(run.steps()) == STEPS
    assert run.info()["error"]["type"] == "process_ended"


def test_a_companion_that_dies_is_started_again(tmp_path: Path) -> None:
    """The run file goes on, and nothing is lost that was flushed before."""
    with receiver() as received:
        run = Run("kill the companion", tmp_path / "run", received.url.removesuffix("/v1/traces"))
    assert (run.code, run.lines) == (0, [f"{3 * STEPS} 0"]), run.errors
    assert run.errors.count("has ended with exit code -9 and was started again; up to 0 spans") == 1
    assert len(run.steps()) == 3 * STEPS
    assert len({span.span_id for span in received.spans if span.name.startswith("torch.step")}) == 3 * STEPS
    assert sum(one.name == "torch.step" for one in open_run(tmp_path / "run").spans()) == 3 * STEPS
    assert run.info()["finished"]


def test_the_loss_of_a_companion_that_dies_is_counted(tmp_path: Path) -> None:
    """Records that it had not read are in `spans_dropped`, within the accuracy of the estimate."""
    with receiver() as received:
        run = Run("kill a companion that is behind", tmp_path / "run", received.url.removesuffix("/v1/traces"))
    spans, dropped = map(int, run.lines[0].split())
    assert 0.8 * spans < dropped < 1.2 * spans, run.errors


def test_a_companion_that_is_killed_at_the_shutdown_is_warned_of(tmp_path: Path) -> None:
    run = Run("shut down with a stopped companion", tmp_path / "run")
    (dropped,) = re.findall(r"before the deadline of shutdown and was killed; up to (\d+) spans are lost", run.errors)
    assert int(dropped) > 0
    assert run.lines[0] == dropped


def test_the_counts_of_a_companion_that_dies_are_those_of_the_last_second(tmp_path: Path) -> None:
    run = Run("kill a companion that has reported", tmp_path / "run")
    known, _ = run.lines
    assert int(known) == STEPS - 1, run.errors


def test_records_that_a_full_channel_drops_are_counted_as_those_of_a_full_buffer(tmp_path: Path) -> None:
    """In `stats()` and as `dropped_queue`, by `flush()` once, and with one warning."""
    small = {"TORCHOTEL_CHANNEL_BYTES": "65536"}
    with receiver() as received:
        run = Run("fill the channel", tmp_path / "run", received.url.removesuffix("/v1/traces"), **small)
    happened, counted = run.lines
    assert happened == "False True True", run.errors
    assert counted.endswith(" 0")
    assert run.errors.count("because the buffer before the worker was full") == 1


def test_a_record_that_is_larger_than_the_channel_costs_no_other(tmp_path: Path) -> None:
    """The message names the setting, and the size that is needed."""
    run = Run("train a large model", tmp_path / "run", TORCHOTEL_CHANNEL_BYTES="65536")
    assert run.lines[0] == "False True", run.errors
    assert len(run.steps()) == 3 * STEPS
    assert len(re.findall(r"the record of one takes \d{6} bytes, and channel_bytes .* is 65536", run.errors)) == 1


def test_a_shutdown_amid_a_restart_leaves_no_companion(tmp_path: Path) -> None:
    run = Run("shut down amid a restart", tmp_path / "run")
    assert run.lines == ["[]", f"{STEPS} 0"], run.errors
    assert "internal error" not in run.errors


def test_a_signal_handler_may_end_a_step_amid_a_record(tmp_path: Path) -> None:
    """Both are recorded, each whole."""
    with receiver() as received:
        run = Run("end a step amid a record", tmp_path / "run", received.url.removesuffix("/v1/traces"))
    assert run.lines == ["None True", f"{3 * STEPS + 1} 0"], run.errors
    assert len({line["number"] for line in run.steps()}) == 3 * STEPS + 1
    assert "internal error" not in run.errors


def test_a_channel_out_of_step_is_begun_again(tmp_path: Path) -> None:
    """No later message could be understood; the reason is logged."""
    with receiver() as received:
        run = Run("garble the channel", tmp_path / "run", received.url.removesuffix("/v1/traces"))
    assert run.lines == [f"{3 * STEPS} 0"], run.errors
    assert "ChannelError: no message" in run.errors
    assert run.errors.count("has ended with exit code 1 and was started again; up to 0 spans") == 1
    assert len(run.steps()) == 3 * STEPS


def test_a_training_goes_on_without_its_companion(tmp_path: Path) -> None:
    """torchotel counts the loss, logs it once, and closes the port, so that a scrape fails at once."""
    run = Run("kill both companions", tmp_path / "run")
    assert run.code == 0
    (line,) = run.lines
    steps, missing = map(int, line.split())
    assert (steps, missing) == (STEPS, 0)
    assert run.errors.count("nothing more is exported") == 1
    assert "TORCHOTEL_WORKER=thread" in run.errors
    assert not (tmp_path / "run" / "unsent.jsonl").exists()  # the training has not ended


def test_a_stopped_companion_delays_nothing_and_goes_on(tmp_path: Path) -> None:
    with receiver() as received:
        run = Run("stop the companion", tmp_path / "run", received.url.removesuffix("/v1/traces"))
    assert run.lines == ["False True", f"{3 * STEPS} 0"], run.errors
    assert len(run.steps()) == 3 * STEPS


def test_a_forked_child_holds_nothing_of_the_companions(tmp_path: Path) -> None:
    """Neither the ring nor the connection, the port or the run file, which would outlive the training."""
    run = Run("fork", tmp_path / "run")
    assert run.lines == ["[]", f"{2 * STEPS} 0"], run.errors


def test_the_companion_is_small_and_has_no_secrets_on_its_command_line(tmp_path: Path) -> None:
    run = Run("look", tmp_path / "run", OTEL_EXPORTER_OTLP_HEADERS="authorization=secret")
    command, libraries, session, _ = run.lines
    assert "torchotel.worker.companion" in command
    assert "secret" not in command
    assert libraries == "[False, False]"  # neither torch nor NumPy
    assert session == "True 10"


def test_an_unusable_setting_takes_the_thread_and_says_why(tmp_path: Path) -> None:
    words = "import torchotel; torchotel.instrument(worker='process', traces_exporter='console', prometheus_port=None)"
    done = subprocess.run(
        [sys.executable, "-c", words], env=environment(), capture_output=True, text=True, timeout=120, check=True
    )
    assert "There is no companion process: the console exporter writes to this process's output" in done.stderr


WORDS = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import torchotel
sys.path.insert(0, sys.argv[2])
options = {"traces_exporter": "none", "prometheus_port": None, "headers": {"large": "x" * 300_000}}
handle = torchotel.instrument(worker="process", **options)
sys.path.pop(0)
with torchotel.step():
    pass
print(handle.flush(60), handle.stats()["steps"])
handle.shutdown()
"""
"""A step with settings that no socket's buffer can hold; the companion looks for modules in the second folder first."""


def one_step(*flags: str, first: str, second: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, *flags, "-c", WORDS, first, second]
    return subprocess.run(words, env=environment(**variables), capture_output=True, text=True, timeout=120, check=True)


def test_the_companion_finds_modules_where_the_training_does(tmp_path: Path) -> None:
    """Without the environment's PYTHONPATH, and if a folder's name has a colon."""
    folder = tmp_path / "a:b"
    folder.mkdir()
    (folder / "torchotel").symlink_to(Path(torchotel.__file__).parent)
    done = one_step("-I", first=str(folder), PYTHONPATH="/nowhere")
    assert done.stdout == "True 1\n", done.stderr


def test_the_companion_runs_no_sitecustomize(tmp_path: Path) -> None:
    """That of opentelemetry-instrument, for example, would instrument the companion."""
    (tmp_path / "sitecustomize.py").write_text(f"open({str(tmp_path / 'customised')!r}, 'a').write('once')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = one_step(first=str(Path(torchotel.__file__).parents[1]), PYTHONPATH=path)
    assert done.stdout == "True 1\n", done.stderr
    assert (tmp_path / "customised").read_text() == "once"


def test_the_end_of_a_companion_that_cannot_start_has_a_reason(tmp_path: Path) -> None:
    broken = tmp_path / "torchotel"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('half an installation')")
    done = one_step(first=str(Path(torchotel.__file__).parents[1]), second=str(tmp_path))
    assert "has ended with exit code 1 (ImportError: half an installation)" in done.stderr


REPLACED = """
import os, signal, pathlib, torchotel
from torchotel._api import start_handle
folders = {"record": "first", "discovery_dir": "targets"}
start_handle({"worker": "process", "traces_exporter": "none", **folders}, None, zero_code=True)
(first,) = pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
while not any(name.startswith("torchotel") for name in os.listdir("targets")):
    pass
os.kill(int(first), signal.SIGSTOP)
handle = torchotel.instrument(record="second", discovery_dir="others")
print(os.path.exists(f"/proc/{first}"), sorted(os.listdir()), os.listdir("targets"))
handle.shutdown()
"""


def test_the_settings_of_the_program_replace_the_companion_of_zero_code(tmp_path: Path) -> None:
    """It is killed, since it need not export anything; its run file and its target are removed."""
    done = subprocess.run(
        [sys.executable, "-c", REPLACED],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == "False ['others', 'second', 'targets'] []\n", done.stderr


CHILDREN = """
import os, signal, sys, torch, torchotel
if sys.argv[1] == "handler":
    signal.signal(signal.SIGCHLD, lambda *_: os._exit(9))
else:
    from torch.utils.data import DataLoader
    list(DataLoader([1, 2], num_workers=1))
with torchotel.instrument(worker="process", traces_exporter="none", prometheus_port=None) as handle:
    print(handle.stats()["worker"]["kind"])
"""


@pytest.mark.parametrize(("what", "kind"), [("handler", "thread"), ("loader", "process")])
def test_a_handler_of_sigchld_is_not_called_by_the_companion(what: str, kind: str) -> None:
    """That of a DataLoader looks at its own workers only."""
    words = [sys.executable, "-c", CHILDREN, what]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, f"{kind}\n"), done.stderr


STATE = """
import json, os, sys, torch, torchotel
handle = torchotel.instrument(worker=sys.argv[1], endpoint=sys.argv[2], prometheus_port=None)
before = handle.stats()["worker"]
session = handle.session
session._guard.fault()
for _ in range(2):
    with torchotel.step():
        pass
handle.flush(5)
assert handle.stats()["internal_errors"] == 1
print(json.dumps([before, handle.stats()["worker"], session.companion_pid or os.getpid()]))
handle.shutdown(1)
print(handle.stats()["worker"])
"""


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_the_counts_of_the_handle_show_the_worker(worker: str) -> None:
    words = [sys.executable, "-c", STATE, worker, NOWHERE]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=120, check=True)
    states, after = done.stdout.splitlines()
    before, then, pid = json.loads(states)
    assert (before["kind"], before["pid"], before["lag_s"], before["last_error"]) == (worker, pid, None, None)
    assert then["lag_s"] > 0
    assert then["last_error"] == "ConnectionError"
    if worker == "process":
        assert before["memory_bytes"] < 100 * 2**20
    else:
        assert before["memory_bytes"] is None
    assert after == "None"


AT_INFO = """
import logging, torch, torchotel
logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO)
with torchotel.instrument(worker="process", endpoint=ENDPOINT, prometheus_port=None) as handle:
    for _ in range(2):
        with torchotel.step():
            pass
        print(handle.flush(60))
"""


def test_the_companion_logs_at_the_level_of_the_program() -> None:
    """A companion with the default level would log warnings only."""
    with receiver() as server:
        server.answers.append(Answer(400))
        words = AT_INFO.replace("ENDPOINT", repr(server.url.removesuffix("/v1/traces")))
        done = commands.python("-c", words, cwd=Path.cwd())
    assert done.stdout.split() == ["False", "True"], done.stderr
    assert "INFO Spans reach" in done.stderr


AT_FLUSH = """
import torch, torchotel, urllib.request
handle = torchotel.instrument(worker="process", detail=2, traces_exporter="none", prometheus_port=0)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
while handle.stats()["overhead_ratio"] is None:
    net(torch.ones(4)).sum().backward()
    optimizer.step()
handle.flush(60)
with urllib.request.urlopen(f"http://127.0.0.1:{handle.prometheus_port}/metrics") as response:
    print("\\ntorchotel_overhead_ratio 0." in response.read().decode())
"""


def test_a_flush_brings_the_counts_of_capture() -> None:
    """Without a flush, the training process writes the counts once a second."""
    words = [sys.executable, "-c", AT_FLUSH]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "True\n", done.stderr


RATIO = """
import time, torch, torchotel, urllib.request
handle = torchotel.instrument(worker="process", detail=2, traces_exporter="none", prometheus_port=0)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
deadline_s, ratio = time.monotonic() + 60, 0.0  # two measurements of few steps may show no cost
while not ratio and time.monotonic() < deadline_s:
    for _ in range(100):
        net(torch.ones(4)).sum().backward()
        optimizer.step()
    with urllib.request.urlopen(f"http://127.0.0.1:{handle.prometheus_port}/metrics") as response:
        lines = [line.decode().split() for line in response]
    ratio = next((float(words[1]) for words in lines if words[0] == "torchotel_overhead_ratio"), 0.0)
print(ratio)
"""


def test_the_cost_of_detail_is_a_metric_while_the_training_runs() -> None:
    """Only the training process can measure it."""
    words = [sys.executable, "-c", RATIO]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=120, check=True)
    assert 0 < float(done.stdout) < 1
