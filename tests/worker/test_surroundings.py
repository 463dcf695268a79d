"""A training with a companion on small or unusual systems: as PID 1, few processes, no folder to write to."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import cgroups
from support.commands import environment

from torchotel.runs.reader import open_run

pytestmark = pytest.mark.program

TRAINING = """
import os, resource, sys, torch, torchotel
if "CGROUP" in os.environ:
    open(os.environ["CGROUP"] + "/cgroup.procs", "w").write(str(os.getpid()))
if "MORE_FILES" in os.environ:
    open_files, most = len(os.listdir("/proc/self/fd")) - 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files + int(os.environ["MORE_FILES"]), most))
handle = torchotel.instrument(worker="process", record=sys.argv[1], traces_exporter="none", prometheus_port=None)
kind = (handle.stats()["worker"] or {"kind": None})["kind"]
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(3):
    net(torch.ones(2)).sum().backward()
    optimizer.step()
handle.flush()
handle.shutdown()
print(os.getpid() == 1, kind, handle.stats()["steps"])
"""


def train(folder: Path, *, before: tuple[str, ...] = (), **variables: str) -> subprocess.CompletedProcess[str]:
    """Train three steps; return whether the training was PID 1, the kind of its worker, and its number of steps."""
    return subprocess.run(
        [*before, sys.executable, "-c", TRAINING, str(folder)],
        env=environment(OMP_NUM_THREADS="1", **variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def in_namespaces(command: str, *flags: str) -> tuple[str, ...]:
    """Return the start of a command line that runs a shell command and then a program in new namespaces."""
    words = ("unshare", "--fork", "--pid", "--mount", "--mount-proc", *flags)
    if shutil.which("unshare") is None or subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        # Without root, and in most containers, the kernel refuses new namespaces.
        pytest.skip("no namespaces can be made: that needs root and unshare")
    return (*words, "sh", "-c", f'{command}exec "$@"', "sh")


def test_as_the_first_process_of_a_container(tmp_path: Path) -> None:
    done = train(tmp_path / "run", before=in_namespaces(""))
    assert (done.returncode, done.stdout) == (0, "True process 3\n"), done.stderr
    assert len([*open_run(tmp_path / "run").records()]) == 3


def test_without_a_folder_for_shared_memory(tmp_path: Path) -> None:
    done = train(tmp_path / "run", before=in_namespaces("mount -t tmpfs -o ro none /dev/shm && "))
    assert (done.returncode, done.stdout) == (0, "True process 3\n"), done.stderr


def test_without_a_home_to_write_to(tmp_path: Path) -> None:
    done = train(tmp_path / "run", HOME="/proc", XDG_STATE_HOME="/proc", XDG_CACHE_HOME="/proc")
    assert (done.returncode, done.stdout) == (0, "False process 3\n"), done.stderr


def test_with_few_files_left_the_thread_takes_the_companions_place(tmp_path: Path) -> None:
    done = train(tmp_path / "run", MORE_FILES="4")
    assert (done.returncode, done.stdout) == (0, "False thread 3\n"), done.stderr
    assert "There is no companion process: it cannot be started" in done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_with_closed_standard_streams_the_thread_takes_the_companions_place(tmp_path: Path, closed: str) -> None:
    """A descriptor of torchotel could have the number of a standard stream, which the companion gets anew."""
    train(tmp_path / "run", before=("sh", "-c", f'exec "$@" {closed}', "sh"))
    assert len([*open_run(tmp_path / "run").records()]) == 3


def test_where_not_even_a_thread_can_be_started_the_training_goes_on(tmp_path: Path) -> None:
    with cgroups.limited("pids", "pids.max", "pids.max", 1) as cgroup:
        done = train(tmp_path / "run", CGROUP=str(cgroup))
    assert (done.returncode, done.stdout) == (0, "False None 0\n"), done.stderr
    assert "can't start new thread" in done.stderr
