"""What real launchers start: each process has a run file of its own, with its rank and the run of its job."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support import commands

from torchotel.runs import open_run

pytestmark = pytest.mark.program

TRAIN = """
import sys, torch, torchotel
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((4,), float(index))


def train(model, workers=0):
    context = "spawn" if workers else None
    loader = torch.utils.data.DataLoader(Rows(), 4, num_workers=workers, multiprocessing_context=context)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in loader:
        model(batch).sum().backward()
        optimizer.step()


def rank(number, folder):
    torchotel.instrument(record=folder + "/run", detail="all")
    torch.distributed.init_process_group(
        "gloo", init_method="file://" + folder + "/store", rank=number, world_size=2
    )
    train(DistributedDataParallel(nn.Linear(4, 1)))
    torch.distributed.destroy_process_group()
"""
PROGRAMS = {
    "torchrun": "torchotel.instrument(record='run')\ntorch.distributed.init_process_group()\n"
    "train(DistributedDataParallel(nn.Linear(4, 1)))\ntorch.distributed.destroy_process_group()\n",
    "alone": "torchotel.instrument(record='run')\ntrain(nn.Linear(4, 1))\n",
    "spawn": "import torch.multiprocessing\n"
    "if __name__ == '__main__':\n    torch.multiprocessing.spawn(rank, (sys.argv[1],), 2)\n",
    "loader": "torchotel.instrument(record='run')\nif __name__ == '__main__':\n    train(nn.Linear(4, 1), workers=2)\n",
    "unknown": "rank(int(sys.argv[1]), sys.argv[2])\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, program in PROGRAMS.items():
        (tmp_path / f"{name}.py").write_text(TRAIN + program)
    return tmp_path


def _recorded(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Return rank, local rank, world size and steps of each run by the name of its folder."""
    found = {}
    for path in _folders(folder):
        resource = _resource(path)
        of = (resource.get(f"torch.{name}") for name in ("rank", "local_rank", "world_size"))
        found[path.name] = (*of, len(list(open_run(path).records())))
    return found


def _folders(folder: Path) -> list[Path]:
    return sorted(file.parent for file in folder.rglob("metrics.jsonl"))


def _resource(path: Path) -> Mapping[str, Any]:
    """Return the resource, which is the same in `run.json` and beside the spans."""
    described: dict[str, Any] = dict(open_run(path).info["resource"])
    first = json.loads((path / "trace-00001.jsonl").read_text().partition("\n")[0])
    sent = {entry["key"]: entry["value"] for entry in first["resourceSpans"][0]["resource"]["attributes"]}
    for name in ("torch.rank", "torch.world_size"):
        assert int(sent[name]["intValue"]) == described[name]
    assert sent["torch.run.id"]["stringValue"] == described["torch.run.id"]
    return described


def _run_ids(folder: Path) -> list[str]:
    return [str(_resource(path)["torch.run.id"]) for path in _folders(folder)]


def _at_once(folder: Path, *launched: tuple[list[str], dict[str, str]]) -> list[str]:
    """Run processes side by side; return what each said."""
    processes = [
        subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            env=commands.environment(**commands.SILENT, **variables),
            stderr=subprocess.PIPE,
            text=True,
        )
        for words, variables in launched
    ]
    said = [process.communicate(timeout=commands.TIMEOUT_S)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), said
    return said


def test_torchrun(folder: Path) -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "torchrun.py"]
    done = commands.python(*words, cwd=folder, OMP_NUM_THREADS="1", **commands.SILENT)
    assert done.returncode == 0, done.stderr
    assert _recorded(folder) == {"rank0": (0, 0, 2, 2), "rank1": (1, 1, 2, 2)}
    first, second = _run_ids(folder)
    assert first == second


def test_tasks_of_a_step_of_slurm(folder: Path) -> None:
    """They have no process group here: by the variables alone."""
    step = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "3"}
    _at_once(folder, *((["alone.py"], {**step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}) for rank in "01"))
    assert _recorded(folder) == {"rank0": (0, 0, 2, 2), "rank1": (1, 1, 2, 2)}
    assert _run_ids(folder) == ["77.3", "77.3"]


def test_processes_of_which_nothing_tells_their_ranks(folder: Path) -> None:
    """None ends for the other's folder, and the second says where it is recorded; both are runs of their own."""
    said = _at_once(folder, (["alone.py"], {}), (["alone.py"], {}))
    assert _recorded(folder) == {"run": (0, 0, 1, 2), "run-2": (0, 0, 1, 2)}
    assert sum(f"{folder / 'run'} holds a run already" in text for text in said) == 1
    first, second = _run_ids(folder)
    assert first != second


def test_a_launcher_that_passes_the_rank_as_an_argument(folder: Path) -> None:
    """The process group tells the rank, also where it comes after `instrument()` has opened the folder."""
    _at_once(folder, *((["unknown.py", rank, str(folder)], {}) for rank in "01"))
    assert sorted(rank for rank, *_ in _recorded(folder).values()) == [0, 1]
    first, second = _run_ids(folder)
    assert first == second


def test_ranks_that_multiprocessing_spawns(folder: Path) -> None:
    done = commands.forked_python("spawn.py", str(folder), cwd=folder, **commands.SILENT)
    assert done.returncode == 0, done.stderr
    assert _recorded(folder) == {"rank0": (0, 0, 2, 2), "rank1": (1, 1, 2, 2)}
    first, second = _run_ids(folder)
    assert first == second


def test_an_exception_in_a_rank_that_multiprocessing_spawns(folder: Path) -> None:
    """PyTorch catches the exception and ends the process by `sys.exit(1)`; the run has the exception."""
    (folder / "spawn.py").write_text(
        (folder / "spawn.py")
        .read_text()
        .replace("\n    torch.distributed.destroy", "\n    1 / 0\n    torch.distributed.destroy")
    )
    done = commands.forked_python("spawn.py", str(folder), cwd=folder, **commands.SILENT)
    assert done.returncode == 1
    errors = [open_run(path).info["error"] for path in folder.glob("run/rank*")]
    assert ("ZeroDivisionError", "division by zero") in [(error["type"], error["message"]) for error in errors]


SHORT = """
import multiprocessing, sys, torch, torchotel
def rank(ends):
    torchotel.instrument(record="run", prometheus_port=None, traces_exporter="none")
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for width in (4, 4, 4) if ends else (5,):
        model(torch.ones(2, width)).sum().backward()
        optimizer.step()
if __name__ == "__main__":
    child = multiprocessing.get_context(sys.argv[1]).Process(target=rank, args=(sys.argv[2] == "ends",))
    child.start()
    child.join()
"""


@pytest.mark.parametrize(("end", "error"), [("ends", None), ("fails", "RuntimeError")])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_short_child(folder: Path, method: str, end: str, error: str | None) -> None:
    """The end is recorded if the worker opens the run file during the shutdown, with the first record."""
    (folder / "short.py").write_text(SHORT)
    done = commands.forked_python("short.py", method, end, cwd=folder, **commands.SILENT)
    info = open_run(folder / "run").info
    assert (info["finished"], info.get("error", {}).get("type")) == (True, error), done.stderr


def test_workers_of_a_data_loader_that_are_spawned(folder: Path) -> None:
    """They run the script's `instrument()` again, and make no folder."""
    done = commands.forked_python("loader.py", cwd=folder, **commands.SILENT)
    assert done.returncode == 0, done.stderr
    assert _recorded(folder) == {"run": (0, 0, 1, 2)}
