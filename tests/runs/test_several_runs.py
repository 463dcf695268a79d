"""Test folders with several runs."""

from pathlib import Path

import pytest
from support import run_folders as folders

from torchotel.runs import RunError
from torchotel.runs.reader import open_runs


def _write(folder: Path, rank: int | None = None) -> Path:
    resource = {} if rank is None else {"torch.rank": rank}
    return folders.write(folder, info={"resource": resource}, units=[folders.step(0, 0.1)])


def test_opens_a_run_or_those_in_a_folder(tmp_path: Path) -> None:
    """A run folder is opened as one run, even if it contains other folders."""
    runs = [_write(tmp_path / "main" / name) for name in ("1", "2")]
    (tmp_path / "main" / "notes").mkdir()
    assert [run.folder for run in open_runs(tmp_path / "main")] == runs
    _write(runs[0] / "inner")
    assert [run.folder for run in open_runs(runs[0])] == [runs[0]]


def test_takes_rank_0_for_all_ranks_of_a_run(tmp_path: Path) -> None:
    """Rank 0 represents all ranks of a run, since ranks wait for each other; any rank can be opened by its path."""
    written = {(run, rank): _write(tmp_path / f"{run}-rank{rank}", rank) for run in (1, 2) for rank in (0, 1)}
    assert [run.folder for run in open_runs(tmp_path)] == [written[1, 0], written[2, 0]]
    assert [run.folder for run in open_runs(written[1, 1])] == [written[1, 1]]


def test_names_the_ranks_of_a_missing_folder(tmp_path: Path) -> None:
    """The error message on a missing folder names the folders of the ranks."""
    for rank in (0, 1, 10):
        _write(tmp_path / f"run-rank{rank}", rank)
    with pytest.raises(RunError, match=r"run: no such folder; name the folder of a rank: .*rank0, .*rank1 and 1 more"):
        open_runs(tmp_path / "run")


def test_says_what_is_wrong_with_a_folder_without_runs(tmp_path: Path) -> None:
    _write(tmp_path / "ranks" / "1-rank1", 1)
    for folder, why in ((tmp_path / "ranks", "no run in it"), (tmp_path / "none", "no such folder")):
        with pytest.raises(RunError, match=why):
            open_runs(folder)
