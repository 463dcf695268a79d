"""Find the run folders of the ranks of a run: `record="run"` makes `run/rank0`, `run/rank1` and so on.

If the rank is not known when a process begins to record, for example because Lightning starts the ranks, the folders
are `run` and `run-2`.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchotel import _semconv as names
from torchotel._utils.distributed import has_rank_name
from torchotel.runs.reader import Run, RunError, holds_run, open_run, read_info

_START_TIME = re.compile(r"\d{8}-\d{6}-")
"""Beginning of the names that `torchotel run` gives, where the ranks of a run can differ."""


class _Identity(NamedTuple):
    """Names a run on all of its ranks."""

    name: str
    """What the program records to."""
    launch: object
    run_id: object
    generation: object
    world_size: object


def open_ranks(folder: Path) -> Sequence[Run]:
    """Open a run with all of its ranks, or one rank by the folder of that rank.

    If several runs have recorded to the folder, the newest is opened.

    Raises:
        RunError: There is no such folder, or the folder holds no run.
    """
    if has_rank_name(folder.resolve()):
        return [open_run(folder)]
    return [open_run(path) for path in sibling_ranks(newest_in(folder) or folder)]


def open_runs(folder: Path) -> Sequence[Run]:
    """Open a run, or all runs in a folder. Of a run with several ranks, only rank 0 is opened.

    Raises:
        RunError: The folder does not exist, or holds no run of a rank 0.
    """
    inner = [] if newest_in(folder) else [newest_in(path, "rank0*") for path in sorted(folder.glob("*"))]
    runs = [open_run(path) for path in inner if path]
    return [run for run in runs if rank_of(run) == 0] or open_ranks(folder)[:1]


def newest_in(folder: Path, ranks: str = "rank*") -> Path | None:
    """Return the folder, or the folder of a rank in it, to which a run has recorded last; None: there is no run."""
    of_ranks = (path for path in folder.glob(ranks) if has_rank_name(path))
    return max(filter(holds_run, (folder, *of_ranks)), key=last_change, default=None)


def last_change(folder: Path) -> tuple[int, str]:
    """Return when a run folder was changed last, for a comparison; equal times are ordered by name."""
    path = folder / "metrics.jsonl"
    return (path if path.exists() else folder).stat().st_mtime_ns, folder.name


def sibling_ranks(folder: Path) -> Sequence[Path]:
    """Return the folders of all ranks of a run in the order of the ranks, if `folder` is one of them.

    The ranks record to the same name, except for the time at which `torchotel run` started each rank, and have the same
    run id, launch, number of restarts and world size in `run.json`. A folder without such a description is returned
    alone.
    """
    if run_folder(folder).name in ("", ".."):
        folder = folder.resolve()
    run = run_folder(folder)
    identity = _identity(run, _info(folder))
    if identity is None:
        return [folder]
    newest: dict[int, Path] = {}
    parts = identity.name, run.name  # a folder may have been renamed
    beside = [path for path in run.parent.iterdir() if any(part in path.name for part in parts)]
    recorded = filter(holds_run, (path for near in beside for path in (near, *near.glob("rank*"))))
    for path in [*sorted(recorded, key=last_change), folder]:
        info = _info(path)
        if _identity(run_folder(path), info) == identity:
            newest[_rank(info)] = path
    return [newest[rank] for rank in sorted(newest)]


def run_folder(folder: Path) -> Path:
    """Return the folder of the run that contains the folder of a rank; another folder is returned unchanged."""
    return folder.parent if has_rank_name(folder) else folder


def run_name(runs: Sequence[Run]) -> str:
    """Return the name of a run, with the rank if only the folder of one rank was opened."""
    folder = runs[0].folder.resolve()
    name = run_folder(folder).name
    return f"{name}-{folder.name}" if len(runs) == 1 and has_rank_name(folder) else name


def rank_of(run: Run) -> int:
    """Return the rank that recorded a run; 0 if the run does not describe it."""
    return _rank(run.info)


def world_size(run: Run) -> int:
    """Return the number of ranks of a run, recorded or not; 1 if the run does not describe it."""
    size = _resource(run.info).get(names.WORLD_SIZE)
    return size if isinstance(size, int) else 1


def host_of(run: Run) -> str:
    """Return the host that a run was recorded on; empty if the run does not describe it."""
    return str(_resource(run.info).get("host.name") or "")


def _info(folder: Path) -> Any:
    try:
        return read_info(folder / "run.json")
    except RunError:
        return {}


def _identity(run: Path, info: Any) -> _Identity | None:
    resource = _resource(info)
    record = (info.get("config") or {}).get("record")
    name = Path(record).name if isinstance(record, str) else run.name
    described = [resource.get(key) for key in (names.RUN_ID, names.RUN_GENERATION, names.WORLD_SIZE)]
    identity = _Identity(_START_TIME.sub("", name, count=1), info.get("launch"), *described)
    return identity if identity.run_id and identity.world_size != 1 else None


def _rank(info: Any) -> int:
    rank = _resource(info).get(names.RANK)
    return rank if isinstance(rank, int) else 0


def _resource(info: Any) -> Any:
    return info.get("resource") or {}
