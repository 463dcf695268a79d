"""Test `torchotel run --nproc-per-node`: an unmodified program on several ranks, and their comparison."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import PROGRAMS, commands, run_folders
from support.ranks import next_line

from torchotel.runs.rank_folders import open_ranks

pytestmark = pytest.mark.program


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text((PROGRAMS / "launched_ddp_program.py").read_text())
    return tmp_path


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return commands.torchotel("run", "--nproc-per-node", "2", *words, cwd=folder, OMP_NUM_THREADS="1")


def test_the_ranks_are_recorded_as_one_run(folder: Path) -> None:
    """Options of torchotel reach each rank, arguments reach the program, and the comparison is printed once."""
    done = run(folder, "--detail=2", "--no-shapes", "train.py", "once", "--more")
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank ") and "[" in line) == [
        "rank 0 ['once', '--more']",
        "rank 1 ['once', '--more']",
    ]
    (recorded,) = (folder / "torchotel-runs").iterdir()
    runs = open_ranks(recorded)
    assert [run.info["resource"]["torch.rank"] for run in runs] == [0, 1]
    assert [(run.info["config"]["detail"], run.info["config"]["shapes"]) for run in runs] == [(2, False)] * 2
    assert done.stdout.count("no rank is named as slow") == 1
    assert f"torchotel summary torchotel-runs/{recorded.name} " in done.stdout


def test_a_rank_that_fails(folder: Path) -> None:
    """The exit code is that of torchrun, and what was recorded is shown."""
    done = run(folder, "--record=mine", "train.py", "fail")
    assert done.returncode == 1
    assert "exitcode  : 5" in done.stderr
    assert "recorded in mine/rank0 … mine/rank1" in done.stdout


def test_bad_options_start_no_rank(folder: Path) -> None:
    done = run(folder, "--detail=often", "train.py", "once")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--detail" in done.stderr


@pytest.mark.parametrize(
    ("ranks", "variables", "problem"),
    [
        ("0", {}, "--nproc-per-node takes a number of ranks or one of auto, cpu, gpu, xpu, not '0'"),
        ("2", {"RANK": "1", "WORLD_SIZE": "4"}, "a launcher has started this process as a rank"),
    ],
)
def test_no_ranks_can_be_started(folder: Path, ranks: str, variables: dict[str, str], problem: str) -> None:
    done = commands.torchotel("run", "--nproc-per-node", ranks, "train.py", cwd=folder, **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert problem in done.stderr


def test_a_program_that_records_to_its_own_folder(folder: Path) -> None:
    """The ranks note where they record. A folder of an earlier run has the name, so each rank has another one."""
    for rank in (0, 1):
        run_folders.write(folder / f"own/rank{rank}", units=[run_folders.step(0, 0.1)])
    program = folder / "train.py"
    program.write_text(f"import torchotel\ntorchotel.instrument(record='own')\n{program.read_text()}")
    done = run(folder, "train.py", "once")
    assert done.returncode == 0, done.stderr
    assert "recorded in own-2/rank0 … own-2/rank1\n  torchotel summary own-2 " in done.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_ranks(folder: Path, number: signal.Signals) -> None:
    """SIGTERM of a scheduler is for this process alone; Ctrl-C is for the whole group."""
    words = ["run", "--nproc-per-node", "2", "--record=mine", "train.py", "forever"]
    process = subprocess.Popen(
        [sys.executable, "-m", "torchotel", *words],
        cwd=folder,
        env=commands.environment(**commands.SILENT, OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    said = [next_line(process.stdout) for _ in range(2)]
    assert all(line.startswith("rank ") for line in said)
    if number == signal.SIGTERM:
        process.terminate()
    else:
        os.killpg(process.pid, number)
    rest, _ = process.communicate(timeout=commands.TIMEOUT_S)
    assert process.returncode != 0
    assert "recorded in mine/rank0 … mine/rank1" in rest
    steps = [[line for line in run.records() if line.kind == "step"] for run in open_ranks(folder / "mine")]
    assert [len(lines) for lines in steps] == [4, 4]
