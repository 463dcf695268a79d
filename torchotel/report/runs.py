"""One run, or several of the same code in one folder."""

from collections.abc import Sequence
from pathlib import Path

from torchotel import _names as names
from torchotel.report.read import Run, open_run


def open_runs(folder: Path) -> Sequence[Run]:
    """Open a run folder, or all that lie in a folder; ranks of one run are not several, so rank 0 stands for them.

    Raises:
        RunError: There is no such folder, or no run of a rank 0.
    """
    inner = () if (folder / "metrics.jsonl").exists() else sorted(folder.glob("*/metrics.jsonl"))
    runs = [open_run(path.parent) for path in inner]
    return [run for run in runs if _rank(run) == 0] or [open_run(folder)]


def _rank(run: Run) -> object:
    return run.info.get("resource", {}).get(names.RANK, 0)
