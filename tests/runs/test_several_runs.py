"""Test folders with several runs."""

import os
import shutil
from pathlib import Path

import pytest
from support import run_folders as folders

from torchotel.runs import RunError
from torchotel.runs.rank_folders import later_runs, open_ranks, open_runs, sibling_ranks


def _write(folder: Path, rank: int | None = None) -> Path:
    resource = {} if rank is None else {"torch.rank": rank}
    return folders.write(folder, info={"resource": resource}, units=[folders.step(0, 0.1)])


def _write_rank(
    folder: Path,
    rank: int,
    run_id: str,
    *,
    generation: int = 0,
    world_size: int = 2,
    record: str = "run",
    changed_s: int = 0,
) -> Path:
    described = {
        "torch.run.id": run_id,
        "torch.run.generation": generation,
        "torch.rank": rank,
        "torch.world_size": world_size,
    }
    config = {"record": f"/elsewhere/{record}"}
    folders.write(folder, info={"config": config, "resource": described}, units=[folders.step(0, 0.1)])
    os.utime(folder / "metrics.jsonl", (changed_s, changed_s))
    return folder


def test_opens_a_run_or_those_in_a_folder(tmp_path: Path) -> None:
    """A run folder is opened as one run, even if it contains other folders."""
    runs = [_write(tmp_path / "main" / name) for name in ("1", "2")]
    (tmp_path / "main" / "notes").mkdir()
    assert [run.folder for run in open_runs(tmp_path / "main")] == runs
    _write(runs[0] / "inner")
    assert [run.folder for run in open_runs(runs[0])] == [runs[0]]


def test_takes_rank_0_for_all_ranks_of_a_run(tmp_path: Path) -> None:
    """Rank 0 represents all ranks of a run, since ranks wait for each other; any rank can be opened by its path."""
    written = {
        (run, rank): _write_rank(tmp_path / str(run) / f"rank{rank}", rank, str(run))
        for run in (1, 2)
        for rank in (0, 1)
    }
    assert [run.folder for run in open_runs(tmp_path)] == [written[1, 0], written[2, 0]]
    assert [run.folder for run in open_runs(written[1, 1])] == [written[1, 1]]


def test_opens_all_ranks_by_their_common_name(tmp_path: Path) -> None:
    """Runs in other folders are other runs."""
    first = [_write_rank(tmp_path / f"run/rank{rank}", rank, "a", changed_s=1) for rank in (1, 0)][::-1]
    second = [_write_rank(tmp_path / f"run-2/rank{rank}", rank, "a", generation=1, changed_s=2) for rank in (0, 1)]
    for ranks in (first, second):
        assert [run.folder for run in open_ranks(ranks[0].parent)] == ranks
        assert [list(sibling_ranks(rank)) for rank in ranks] == [ranks, ranks]
        assert [run.folder for run in open_ranks(ranks[1])] == [ranks[1]]
        assert [run.folder for run in open_runs(ranks[0].parent)] == ranks[:1]
    assert [run.folder for run in open_runs(tmp_path)] == [first[0], second[0]]


def test_joins_no_ranks_of_another_launch(tmp_path: Path) -> None:
    """The second rank of the first launch has recorded nothing, and the run id is fixed."""
    first = _write_rank(tmp_path / "run/rank0", 0, "a", changed_s=1)
    later = [
        [_write_rank(tmp_path / f"run-{number}/rank{rank}", rank, "a", changed_s=number) for rank in (0, 1)]
        for number in (2, 3)
    ]
    assert [run.folder for run in open_ranks(tmp_path / "run")] == [first]
    for ranks in later:
        assert [run.folder for run in open_ranks(ranks[0].parent)] == ranks
    assert [run.folder for run in open_runs(tmp_path)] == [first, later[0][0], later[1][0]]


def test_opens_the_rank_that_a_link_names(tmp_path: Path) -> None:
    ranks = [_write_rank(tmp_path / f"run/rank{rank}", rank, "a") for rank in (0, 1)]
    (tmp_path / "last").symlink_to(ranks[1])
    moved = ranks[0].rename(tmp_path / "moved")
    ranks[0].symlink_to(moved)
    assert [[run.folder for run in open_ranks(path)] for path in (tmp_path / "last", ranks[0])] == [
        [tmp_path / "last"],
        ranks[:1],
    ]
    assert [run.folder for run in open_ranks(tmp_path / "run")] == ranks


def test_finds_the_later_runs_of_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those that are named alike, and not the other ranks of the run."""
    first = [_write_rank(tmp_path / name, rank, "a", changed_s=2) for rank, name in enumerate(("run", "run-2"))]
    _write_rank(tmp_path / "run-3/rank0", 0, "b", changed_s=3)
    for name, changed_s in (("run-10", 4), ("run-4", 1), ("run-test", 5), ("5", 5)):
        _write_rank(tmp_path / name, 0, name, changed_s=changed_s)
    _write_rank(tmp_path / "run-5", 0, "c", record="run-5", changed_s=5)  # the program has asked for this name
    (tmp_path / "run-11").mkdir()
    assert [path.name for path in later_runs(tmp_path / "run", first)] == ["run-3", "run-10"]
    monkeypatch.chdir(first[0])
    assert [path.name for path in later_runs(Path(), first)] == ["run-3", "run-10"]
    assert not later_runs(tmp_path / "run-2", first[1:])


@pytest.mark.parametrize(("inside", "named"), [(".", "run"), ("run", "."), ("run/rank0", "..")])
def test_opens_all_ranks_by_a_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str, named: str
) -> None:
    ranks = [_write_rank(tmp_path / f"run/rank{rank}", rank, "a") for rank in (0, 1)]
    monkeypatch.chdir(tmp_path / inside)
    assert [run.folder.resolve() for run in open_ranks(Path(named))] == ranks


def test_opens_one_rank_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [_write_rank(tmp_path / f"run/rank{rank}", rank, "a") for rank in (0, 1)]
    monkeypatch.chdir(ranks[1])
    assert [run.folder.resolve() for run in open_ranks(Path())] == ranks[1:]
    assert list(sibling_ranks(Path())) == ranks


def test_finds_ranks_whose_folders_have_no_rank(tmp_path: Path) -> None:
    """The name that the program records to tells them from runs beside them; so does the launch."""

    def write(name: str, rank: int, record: str, launch: str) -> Path:
        info = {
            "launch": launch,
            "config": {"record": f"/elsewhere/{record}"},
            "resource": {"torch.run.id": "a", "torch.rank": rank, "torch.world_size": 2},
        }
        return folders.write(tmp_path / name, info=info, units=[folders.step(0, 0.1)])

    runs = [
        [write("lr-1", 0, "lr-1", "x"), write("lr-1-2", 1, "lr-1", "x")],
        [write("lr-2", 0, "lr-2", "x"), write("lr-2-2", 1, "lr-2", "x")],
        [write("lr-1-3", 0, "lr-1", "y"), write("lr-1-4", 1, "lr-1", "y")],
    ]
    (tmp_path / ".#lr-1.yaml").symlink_to("nowhere")  # the lock of an editor
    for ranks in runs:
        assert [[run.folder for run in open_ranks(rank)] for rank in ranks] == [ranks, ranks]


def test_finds_ranks_in_a_folder_that_was_renamed(tmp_path: Path) -> None:
    for rank in (0, 1):
        _write_rank(tmp_path / f"run/rank{rank}", rank, "a")
    shutil.copytree(tmp_path / "run", tmp_path / "best")
    assert [run.folder for run in open_ranks(tmp_path / "best")] == [tmp_path / f"best/rank{rank}" for rank in (0, 1)]
    shutil.rmtree(tmp_path / "best/rank0")
    assert [run.folder for run in open_ranks(tmp_path / "best")] == [tmp_path / "best/rank1"]


def test_finds_ranks_that_started_at_different_times(tmp_path: Path) -> None:
    """Without `--record`, `torchotel run` names the folder of each rank by the start time of that rank."""
    names = [f"20261126-10000{rank}-train" for rank in (0, 1)]
    ranks = [_write_rank(tmp_path / f"{name}/rank{rank}", rank, "a", record=name) for rank, name in enumerate(names)]
    _write_rank(tmp_path / "20261126-100000-train/rank1", 1, "another")
    assert sibling_ranks(ranks[0]) == sibling_ranks(ranks[1]) == ranks


def test_says_what_is_wrong_with_a_folder_without_runs(tmp_path: Path) -> None:
    _write(tmp_path / "ranks" / "1" / "rank1", 1)
    for folder, why in ((tmp_path / "ranks", "no run in it"), (tmp_path / "none", "no such folder")):
        with pytest.raises(RunError, match=why):
            open_runs(folder)
