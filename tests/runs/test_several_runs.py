"""Several runs in one folder."""

from pathlib import Path

import pytest
from support import run_folders as folders

from torchotel.runs import RunError
from torchotel.runs.reader import open_runs


def _write(folder: Path, rank: int | None = None) -> Path:
    resource = {} if rank is None else {"torch.rank": rank}
    return folders.write(folder, info={"resource": resource}, units=[folders.step(0, 0.1)])


def test_opens_a_run_or_those_in_a_folder(tmp_path: Path) -> None:
    """A run is one run, whatever else lies in it."""
    runs = [_write(tmp_path / "main" / name) for name in ("1", "2")]
    (tmp_path / "main" / "notes").mkdir()
    assert [run.folder for run in open_runs(tmp_path / "main")] == runs
    _write(runs[0] / "inner")
    assert [run.folder for run in open_runs(runs[0])] == [runs[0]]


def test_takes_rank_0_for_all_ranks_of_a_run(tmp_path: Path) -> None:
    """They wait for each other, so they are not runs of their own; one that is named is opened all the same."""
    written = {(run, rank): _write(tmp_path / f"{run}-rank{rank}", rank) for run in (1, 2) for rank in (0, 1)}
    assert [run.folder for run in open_runs(tmp_path)] == [written[1, 0], written[2, 0]]
    assert [run.folder for run in open_runs(written[1, 1])] == [written[1, 1]]


def test_names_the_ranks_of_a_missing_folder(tmp_path: Path) -> None:
    """Each rank has a folder of its own, with its number behind the name that was given."""
    for rank in (0, 1, 10):
        _write(tmp_path / f"run-rank{rank}", rank)
    with pytest.raises(RunError, match=r"run: no such folder; .*run-rank0, .*run-rank1 and 1 more"):
        open_runs(tmp_path / "run")


def test_says_what_is_wrong_with_a_folder_without_runs(tmp_path: Path) -> None:
    _write(tmp_path / "ranks" / "1-rank1", 1)
    for folder, why in ((tmp_path / "ranks", "no run in it"), (tmp_path / "none", "no such folder")):
        with pytest.raises(RunError, match=why):
            open_runs(folder)
