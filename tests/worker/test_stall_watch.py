"""A stall is a phase that is open and has no event, as the companion sees it."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from support import commands, crashing_program
from support.prometheus_server import until

from torchotel.runs import open_run, summarise
from torchotel.worker.collective_watch import FIRST_STEP_FACTOR, STALL_FACTOR
from torchotel.worker.stall_watch import MAX_TICK_S, Frame, StackReader, StallWatch, describe_frames
from torchotel.worker.status_page import PAGE_BYTES, PageReader, PhaseWriter, write_stack_signal

THREAD = 42
TIMEOUT_S = 60.0
LAYER = Frame("/venv/site-packages/torch/nn/modules/module.py", 1893, "_call_impl")
LOCK = Frame("/home/someone/train.py", 12, "forward")


class Stacks:
    """The stack of a process, without a process."""

    def __init__(self, *frames: Frame) -> None:
        self.frames, self.requests = list(frames), 0

    def read(self) -> str:
        self.requests += 1
        lines = (f'  File "{path}", line {line} in {function}\n' for path, line, function in self.frames)
        return "Stack (most recent call first):\n" + "".join(lines)


class Watched:
    """A page with phases, and its watch, which is asked once a second."""

    def __init__(self, *frames: Frame, pid: int | None = None) -> None:
        page = memoryview(bytearray(PAGE_BYTES)).cast("Q")
        self.writer, self.stacks = PhaseWriter(page, THREAD), Stacks(*(frames or (LOCK, LAYER)))
        stacks: Any = self.stacks
        self.watch = StallWatch(PageReader(page), stacks, pid or os.getpid(), TIMEOUT_S)
        self.now_s = time.monotonic()

    def begin(self, kind: str = "forward") -> None:
        self.writer.begin(kind, time.perf_counter_ns())

    def end(self, kind: str = "forward") -> None:
        self.writer.end(kind, time.perf_counter_ns())

    def stalls(self, seconds: int) -> list[int]:
        """Return after how many further seconds each stall is found."""
        found = []
        for second in range(1, seconds + 1):
            self.now_s += 1
            if self.watch.check(self.now_s) is not None:
                found.append(second)
        return found


def trained() -> Watched:
    watched = Watched()
    watched.watch.limit.add_step(0.5)
    return watched


def test_an_open_phase_without_an_event_is_one_stall() -> None:
    watched = trained()
    watched.begin()
    (second,) = watched.stalls(500)
    assert TIMEOUT_S <= second <= TIMEOUT_S + 2
    assert watched.watch.is_stalled
    watched.end()
    assert watched.stalls(500) == []
    assert not watched.watch.is_stalled


def test_an_exception_that_ends_the_wait_ends_the_stall() -> None:
    """The phase stays open on the page, for example after Ctrl-C in a notebook."""
    watched = trained()
    watched.begin()
    assert len(watched.stalls(100)) == 1
    watched.stacks.frames = [Frame("/usr/lib/python3.11/selectors.py", 468, "select")]
    assert watched.stalls(100) == []
    assert not watched.watch.is_stalled


def test_each_event_begins_the_time_anew() -> None:
    watched = trained()
    for _ in range(20):
        watched.begin()
        assert watched.stalls(30) == []
        watched.end()
        assert watched.stalls(30) == []


def test_no_open_phase_is_no_stall() -> None:
    """A notebook that idles, for example."""
    watched = trained()
    watched.begin()
    watched.end()
    assert watched.stalls(5000) == []
    assert not watched.stacks.requests


def test_long_steps_have_a_longer_limit() -> None:
    watched = Watched()
    for _ in range(20):
        watched.watch.limit.add_step(30.0)
    watched.watch.limit.add_step(3000.0)  # one slow step does not count
    watched.begin()
    (second,) = watched.stalls(500)
    assert second >= STALL_FACTOR * 30


def test_the_first_step_has_a_longer_limit() -> None:
    watched = Watched()
    watched.begin()
    (second,) = watched.stalls(1000)
    assert second >= FIRST_STEP_FACTOR * TIMEOUT_S


@pytest.mark.parametrize(
    "frames",
    [
        (Frame("/usr/lib/python3.11/selectors.py", 468, "select"), Frame("/venv/ipykernel/kernelapp.py", 7, "start")),
        (Frame("/usr/lib/python3.11/bdb.py", 90, "trace_dispatch"), LOCK, LAYER),
        (Frame("/usr/lib/python3.11/code.py", 90, "interact"), LOCK, LAYER),
        (Frame("/venv/IPython/terminal/embed.py", 90, "mainloop"), LOCK, LAYER),
        (Frame("/venv/pydevd/pydevd_frame.py", 90, "do_wait_suspend"), LOCK, LAYER),
        (Frame("/venv/site-packages/torch/_dynamo/convert_frame.py", 90, "_compile"), LAYER),
        (Frame("/usr/lib/python3.11/subprocess.py", 9, "wait"), Frame("/envs/torch/lib/python3.11/site.py", 7, "main")),
    ],
)
def test_the_stacks_tell_a_stall_from_a_wait(frames: tuple[Frame, ...]) -> None:
    """An exception has ended the phase, or a debugger or the compiler works. Stacks are read ever less often."""
    watched = Watched(*frames)
    watched.watch.limit.add_step(0.5)
    watched.begin()
    assert watched.stalls(3600) == []
    assert watched.stacks.requests == 6  # after 1, 2, 4, 8, 16 and 32 minutes
    watched.stacks.frames = [LOCK, LAYER]
    assert len(watched.stalls(3600)) == 1


def test_the_time_in_which_the_companion_is_stopped_does_not_count() -> None:
    watched = trained()
    watched.begin()
    watched.stalls(2)
    for _ in range(int(TIMEOUT_S / MAX_TICK_S) - 2):
        watched.now_s += 3600
        assert watched.watch.check(watched.now_s) is None


def test_a_stopped_process_does_not_stall() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        watched = Watched(pid=process.pid)
        watched.watch.limit.add_step(0.5)
        watched.begin()
        assert watched.stalls(500) == []
        os.kill(process.pid, signal.SIGCONT)
        os.waitpid(process.pid, os.WCONTINUED)
        assert len(watched.stalls(500)) == 1
        process.kill()


def test_a_process_that_does_not_wait_for_the_signal_does_not_get_it() -> None:
    """The signal would end it."""
    fd, page = os.memfd_create("stacks"), memoryview(bytearray(PAGE_BYTES)).cast("Q")
    for number in (0, int(signal.SIGRTMAX), int(signal.SIGKILL), 1 << 40):
        write_stack_signal(page, number)
        assert StackReader(os.getppid(), fd, PageReader(page)).read() == ""
    os.close(fd)


# Programs.


class Stalled:
    """A training that has stalled at a place, until the block ends.

    Args:
        folder: The run.
        place: Where it waits.
        end: How it waits.
        variables: Settings.
    """

    def __init__(self, folder: Path, place: str, end: str, **variables: str) -> None:
        self.folder = folder
        words = [sys.executable, str(crashing_program.__file__), str(folder), place, end]
        settings = {**commands.SILENT, "TORCHOTEL_WORKER": "process", "TORCHOTEL_STALL_TIMEOUT_S": "1"}
        environment = commands.environment(**settings, **variables)
        self._process = subprocess.Popen(
            words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        _, self._port = self._process.stdout.readline().split()
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def stalled(self) -> bool:
        """Return whether the metric shows a stall."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics") as response:
            return "torch_run_stalled 1.0\n" in response.read().decode()

    def wait(self) -> dict[str, Any]:
        """Wait for the stall, and return its line in the run file."""
        until(self.stalled, bool)
        return until(self._stalls, bool)[-1]  # on a busy machine an earlier step may have stalled

    def _stalls(self) -> list[dict[str, Any]]:
        whole, _, _ = (self.folder / "metrics.jsonl").read_text().rpartition("\n")
        return [line for line in map(json.loads, whole.splitlines()) if line["kind"] == "stall"]

    def go_on(self) -> str:
        """Let the training go on to its end, and return what it wrote to the standard error."""
        _, errors = self._process.communicate("\n", timeout=60)
        assert self._process.returncode == 0, errors
        return errors

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.communicate()


@pytest.mark.program
@pytest.mark.parametrize("end", ["wait", "wait with the GIL"])
@pytest.mark.parametrize(
    ("place", "phase"),
    [("forward", "forward"), ("backward", "backward"), ("fetch", "data"), ("optimizer", "optimizer")],
)
def test_a_stall_is_seen_from_outside(tmp_path: Path, place: str, phase: str, end: str) -> None:
    """Its trace, the metric and the run file show it while it lasts, also if C code holds the GIL."""
    training = Stalled(tmp_path / "run", place, end)
    line = training.wait()
    waits_in = "wait_for_a_line" if end == "wait" else "wait_with_the_gil"
    assert (line["number"], line["error"]["type"], line["error"]["phase"]) == (crashing_program.STEPS, "stalled", phase)
    assert line["error"]["message"].startswith('File "crashing_program.py", line ')
    assert waits_in in line["error"]["message"]
    errors = training.go_on()
    assert f"Nothing has happened in the {phase} of step {crashing_program.STEPS} for " in errors
    assert f"in {waits_in}\n" in errors
    run = open_run(tmp_path / "run")
    summary = summarise(run.records(), run.spans())
    assert summary.steps == crashing_program.STEPS + 1  # the step that stalled is counted once
    assert not summary.errors
    assert summary.last_stall is not None
    assert summary.last_stall.message == line["error"]["message"]
    (root,) = [span for span in run.spans() if span.name == "torch.stall"]
    assert root.attributes["torch.step.number"] == crashing_program.STEPS


@pytest.mark.program
def test_summary_and_report_of_a_stalled_run_name_the_place(tmp_path: Path) -> None:
    training = Stalled(tmp_path / "run", "evaluation", "wait", TORCHOTEL_EXCEPTION_TEXT="type")
    assert training.wait()["error"]["message"] == ""  # the setting leaves out places
    # The last step is recorded when the next one begins.
    place = f"stalled at evaluation {crashing_program.STEPS}, after step {crashing_program.STEPS - 2}"
    assert place in commands.torchotel("summary", str(tmp_path / "run"), cwd=tmp_path).stdout
    page = tmp_path / "report.html"
    commands.torchotel("report", str(tmp_path / "run"), "--output", str(page), cwd=tmp_path)
    assert f"The training {place}" in page.read_text()
    training.kill()


HANDLER = """
import os, signal, torch, torchotel
from torchotel.worker.stall_watch import StackSignal

handle = torchotel.instrument(worker="process", traces_exporter="none", prometheus_port=None)
page = handle.session._backend._channel.page
first = next(number for number in page[:20] if signal.SIGRTMIN <= number <= signal.SIGRTMAX)
calls = []
signal.signal(first, lambda *_: calls.append("called"))
for _ in range(2):
    with torchotel.step():
        pass
handle.flush(60)
assert first not in page[:8].tolist()
second = next(number for number in page[:8] if signal.SIGRTMIN <= number <= signal.SIGRTMAX)
signal.signal(second, signal.SIG_IGN)
signal.signal(second, signal.SIG_DFL)
assert StackSignal().usable() == second
handle.shutdown()
os.kill(os.getpid(), second)
os.kill(os.getpid(), first)
print(calls)
"""


@pytest.mark.program
def test_a_handler_of_the_program_is_kept_and_a_lost_one_of_torchotel_is_set_again() -> None:
    """The signal goes elsewhere if the program takes it, and its handler outlives torchotel."""
    done = subprocess.run(
        [sys.executable, "-c", HANDLER],
        env=commands.environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == "['called']\n", done.stderr


def test_a_stall_names_the_line_of_the_program() -> None:
    """A collective waits far inside of PyTorch."""
    torch_frames = [Frame(f"/usr/lib/python3.11/site-packages/torch/{name}.py", 1, name) for name in "abcd"]
    own = Frame("/home/user/train.py", 23, "main")
    start = Frame("/home/user/train.py", 25, "<module>")
    innermost = ", called from ".join(f'File "{name}.py", line 1 in {name}' for name in "abc")
    assert (
        describe_frames([*torch_frames, own, start]) == f'{innermost}, in the program File "train.py", line 23 in main'
    )
    assert describe_frames(torch_frames) == innermost
    assert describe_frames([own, start]) == f"{own}, called from {start}"
