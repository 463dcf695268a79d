"""Find the run folders of the ranks of a run: `record="run"` makes `run-rank0`, `run-rank1` and so on.

If the rank is not known when a process begins to record, for example because Lightning starts the ranks, the folders
are `run` and `run-2`.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchotel import _semconv as names
from torchotel.runs.reader import Run, RunError, holds_run, open_run, read_info

_RANK_FOLDER = re.compile(r"(?P<name>.+)-rank(?P<rank>\d+)(-\d+)?")
"""Name of a rank's folder; the last number is appended if a folder of an earlier run has the name."""


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
    """Open a run by its folder, or all ranks of a run by the name that the ranks' folders have in common.

    The name stands for the newest run, if several have recorded to this name. A folder named after its rank is opened
    alone.

    Raises:
        RunError: There is no such folder and no rank of such a run, or the folder holds no run.
    """
    if not holds_run(folder):
        ranks = [path for path in folder.parent.glob("*-rank*") if _base(path.name) == folder.name and holds_run(path)]
        if ranks:
            return [open_run(path) for path in sibling_ranks(max(ranks, key=_last_change))]
    is_of_rank = _RANK_FOLDER.fullmatch(folder.resolve().name)
    return [open_run(path) for path in ([folder] if is_of_rank else sibling_ranks(folder))]


def open_runs(folder: Path) -> Sequence[Run]:
    """Open a run, or all runs in a folder. Of a run with several ranks, only rank 0 is opened.

    Raises:
        RunError: The folder does not exist, or holds no run of a rank 0.
    """
    inner = () if holds_run(folder) else sorted(folder.glob("*/metrics.jsonl"))
    runs = [open_run(path.parent) for path in inner]
    return [run for run in runs if rank_of(run) == 0] or open_ranks(folder)[:1]


def sibling_ranks(folder: Path) -> Sequence[Path]:
    """Return the folders of all ranks of a run in the order of the ranks, if `folder` is one of them.

    The ranks record to the same name, except for the time at which `torchotel run` started each rank, and have the same
    run id, launch, number of restarts and world size in `run.json`. A folder without such a description is returned
    alone.
    """
    if not folder.name or folder.name == "..":
        folder = folder.resolve()
    identity = _identity(folder, _info(folder))
    if identity is None:
        return [folder]
    newest: dict[int, Path] = {}
    parts = identity.name, _base(folder.name)  # a folder may have been renamed
    runs = [path for path in folder.parent.iterdir() if any(part in path.name for part in parts) and holds_run(path)]
    for path in [*sorted(runs, key=_last_change), folder]:
        info = _info(path)
        if _identity(path, info) == identity:
            newest[_rank(info)] = path
    return [newest[rank] for rank in sorted(newest)]


def run_name(runs: Sequence[Run]) -> str:
    """Return the name of a run folder, or the name that the folders of several ranks have in common."""
    name = runs[0].folder.resolve().name
    return _base(name) if len(runs) > 1 else name


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


def _base(name: str) -> str:
    """Return the name of a folder without its rank."""
    found = _RANK_FOLDER.fullmatch(name)
    return found["name"] if found else name


def _info(folder: Path) -> Any:
    try:
        return read_info(folder / "run.json")
    except RunError:
        return {}


def _identity(folder: Path, info: Any) -> _Identity | None:
    resource = _resource(info)
    record = (info.get("config") or {}).get("record")
    name = Path(record).name if isinstance(record, str) else _base(folder.resolve().name)
    described = [resource.get(name) for name in (names.RUN_ID, names.RUN_GENERATION, names.WORLD_SIZE)]
    identity = _Identity(_START_TIME.sub("", name, count=1), info.get("launch"), *described)
    return identity if identity.run_id and identity.world_size != 1 else None


def _rank(info: Any) -> int:
    rank = _resource(info).get(names.RANK)
    return rank if isinstance(rank, int) else 0


def _resource(info: Any) -> Any:
    return info.get("resource") or {}


def _last_change(folder: Path) -> tuple[int, str]:
    path = folder / "metrics.jsonl"
    return (path if path.exists() else folder).stat().st_mtime_ns, folder.name
