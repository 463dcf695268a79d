"""The cause of the end of a training process, from what `faulthandler` and the kernel have recorded."""

import os
from pathlib import Path

import pytest
from support.commands import python

from torchotel._records import PROCESS_ENDS
from torchotel.worker import end_cause
from torchotel.worker.end_cause import OOM_KILL, PROCESS_ENDED, EndCause

STACK = """Fatal Python error: {}

Current thread 0x00007f0000000000 (most recent call first):
  File "/home/someone/train.py", line 12 in forward
  File "/home/someone/main.py", line 3 in <module>

Extension modules: numpy (total: 1)
"""


def signals(text: str) -> int:
    fd = os.memfd_create("signals")
    os.write(fd, text.encode())
    return fd


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Segmentation fault", "SIGSEGV"),
        ("Aborted", "SIGABRT"),
        ("Bus error", "SIGBUS"),
        ("Floating point exception", "SIGFPE"),
        ("Floating-point exception", "SIGFPE"),
        ("Illegal instruction", "SIGILL"),
    ],
)
def test_a_recorded_signal_is_the_cause(name: str, kind: str) -> None:
    found = EndCause(signals(STACK.format(name)), with_place=True).find()
    assert found == (kind, 'File "train.py", line 12 in forward', None)
    assert kind in PROCESS_ENDS
    assert EndCause(signals(STACK.format(name)), with_place=False).find() == (kind, "", None)


@pytest.mark.parametrize("text", ["", "\0" * 100, "Fatal Python error: something", STACK.format("?")])
def test_a_text_that_names_no_signal_is_no_cause(text: str) -> None:
    assert EndCause(signals(text), with_place=True).find() == PROCESS_ENDED


def test_a_thread_without_a_frame_of_python_has_no_place() -> None:
    text = "Fatal Python error: Aborted\n\nThread 0x01 (most recent call first):\n  <no Python frame>\n"
    assert EndCause(signals(text), with_place=True).find() == ("SIGABRT", "", None)


@pytest.mark.parametrize(
    ("own", "counter"),
    [
        ("0::/job", "job/memory.events"),
        ("0::/", "memory.events"),
        ("0::/outside/job", "memory.events"),
        ("4:cpu:/job\n3:memory:/job", "memory/job/memory.oom_control"),
        ("3:memory,hugetlb:/outside/job", "memory/memory.oom_control"),
    ],
)
def test_a_kill_of_the_cgroup_since_the_start_is_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, counter: str
) -> None:
    """With both versions of cgroups, and in a container that mounts its own cgroup as the root."""
    monkeypatch.setattr(end_cause, "_CGROUPS", tmp_path)
    monkeypatch.setattr(end_cause, "_OWN_CGROUPS", tmp_path / "own")
    (tmp_path / "own").write_text(own + "\n")
    path = tmp_path / counter
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("oom 9\noom_kill 3\noom_group_kill 0\n")
    cause = EndCause(None, with_place=True)
    assert cause.find() == PROCESS_ENDED
    path.write_text("oom 9\noom_kill 4\noom_group_kill 0\n")
    assert cause.find() == OOM_KILL
    path.unlink()
    assert cause.find() == PROCESS_ENDED


def test_an_earlier_kill_is_no_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that of a DataLoader's worker."""
    monkeypatch.setattr(end_cause, "_CGROUPS", tmp_path)
    monkeypatch.setattr(end_cause, "_OWN_CGROUPS", tmp_path / "own")
    (tmp_path / "own").write_text("0::/\n")
    events = tmp_path / "memory.events"
    events.write_text("oom_kill 0\n")
    cause = EndCause(None, with_place=True)
    events.write_text("oom_kill 1\n")
    cause.refresh()
    assert cause.find() == OOM_KILL
    cause.refresh()
    assert cause.find() == PROCESS_ENDED


PROGRAM = """
import faulthandler, os, signal
from torchotel.worker.end_cause import FatalSignals

def text(fd):
    return os.pread(fd, 1000, 0).decode().split("\\n")[0]

def crash_in_child():
    if (pid := os.fork()) == 0:
        first.close()
        os.abort()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

first = FatalSignals()
kept = os.dup(first.fd)
print(faulthandler.is_enabled(), crash_in_child(), repr(text(kept)))
seen = []
signal.signal(signal.SIGABRT, lambda *_: seen.append("the program's handler"))
first.close()
os.kill(os.getpid(), signal.SIGABRT)
print(seen, first.fd)
second = FatalSignals()
print(second.fd is not None)
faulthandler.enable()
print(second.fd, FatalSignals().fd)
"""


@pytest.mark.program
def test_the_handlers_of_the_program_stay(tmp_path: Path) -> None:
    """Also in a forked child. The file is closed if the program names another one."""
    done = python("-u", "-c", PROGRAM, cwd=tmp_path)
    assert done.stdout.splitlines() == [
        "True -6 ''",
        '["the program\'s handler"] None',
        "True",
        "None None",
    ], done.stderr


@pytest.mark.program
def test_handlers_from_before_stay(tmp_path: Path) -> None:
    """`faulthandler` would write a signal that the program survives, and take part of what its handler gets."""
    program = (
        "import faulthandler, signal; from torchotel.worker.end_cause import FatalSignals; "
        "signal.signal(signal.SIGABRT, lambda *_: None); print(FatalSignals().fd, faulthandler.is_enabled())"
    )
    done = python("-c", program, cwd=tmp_path)
    assert done.stdout == "None False\n", done.stderr
