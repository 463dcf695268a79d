"""Find the run folders of the ranks of a run: `record="run"` makes `run/rank0`, `run/rank1` and so on.

If the rank is not known when a process begins to record, for example because Lightning starts the ranks, the folders
are `run` and `run-2`.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchotel import _semconv as names
from torchotel._utils.distributed import has_rank_name
from torchotel.runs.reader import Run, RunError, holds_run, open_run, read_info

_START_TIME = re.compile(r"\d{8}-\d{6}-")
"""Beginning of the names that `torchotel run` gives, where the ranks of a run can differ."""


MAX_NAMED_RUNS = 4
"""Runs that a message names."""


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
    if names_rank(folder):
        return [open_run(folder)]
    newest = newest_in(folder)
    inside = [] if newest else [path.name for path in sorted(folder.glob("*")) if newest_in(path)]
    if inside:
        shown = ", ".join(inside[-MAX_NAMED_RUNS:])
        raise RunError(f"{folder}: no run in it, but in {len(inside):,} of its folders; name one of them: {shown}")
    return [open_run(path) for path in sibling_ranks(newest or folder)]


def names_rank(folder: Path) -> bool:
    """Return whether a path is the folder of one rank, or a link to it."""
    return has_rank_name(folder) or has_rank_name(folder.resolve())


def open_runs(folder: Path) -> Sequence[Run]:
    """Open a run, or all runs in a folder. Of a run with several ranks, only rank 0 is opened.

    Raises:
        RunError: The folder does not exist, or holds no run of a rank 0.
    """
    inner = [] if newest_in(folder) else [path for path in sorted(folder.glob("*")) if newest_in(path)]
    runs = {run.folder: run for path in inner for run in open_ranks(path)[:1] if rank_of(run) == 0}
    return [*runs.values()] or open_ranks(folder)[:1]


def newest_in(folder: Path) -> Path | None:
    """Return the folder, or the folder of a rank in it, to which a run has recorded last; None: there is no run."""
    return max(filter(holds_run, _with_ranks(folder)), key=last_change, default=None)


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
    folder = _with_name(folder)
    run, info = run_folder(folder), _info(folder)
    identity = _identity(run, info)
    if identity is None:
        return [folder]
    ranks = {**_ranks_in(run, identity), _rank(info): folder}
    if len(ranks) != identity.world_size and identity.name and identity.name in run.name:  # it was not renamed
        for path in _newest_first(path for path in run.parent.glob("*") if identity.name in path.name):
            others = _ranks_in(path, identity)
            if not others.keys() & ranks.keys():  # else they are another launch
                ranks.update(others)
    return [ranks[rank] for rank in sorted(ranks)]


def later_runs(folder: Path, opened: Sequence[Path]) -> Sequence[Path]:
    """Return the folders of later runs, which were not recorded to `folder` because that held a run already.

    Args:
        folder: The folder that the user has named.
        opened: The folders that were read for it, one for each rank; they do not count.
    """
    folder = _with_name(folder)
    runs = {run_folder(path.resolve()) for path in opened}
    changed, record = max(map(last_change, opened)), _recorded_name(_info(opened[0]))
    later = {}
    for path in folder.parent.glob("*"):
        numbered = re.fullmatch(rf"{re.escape(folder.name)}-(\d+)", path.name)
        newest = newest_in(path) if numbered and path.resolve() not in runs else None
        if numbered and newest and last_change(newest) > changed and _recorded_name(_info(newest)) == record:
            later[int(numbered[1])] = path
    return [later[number] for number in sorted(later)]


def run_folder(folder: Path) -> Path:
    """Return the folder of the run that contains the folder of a rank; another folder is returned unchanged."""
    return folder.parent if has_rank_name(folder) else folder


def run_name(runs: Sequence[Run]) -> str:
    """Return the name of a run, with the rank if only the folder of one rank was opened."""
    folder = _with_name(runs[0].folder)
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


def _with_name(folder: Path) -> Path:
    """Return a path in which the folder of the run has a name; links to that folder keep theirs."""
    return folder.resolve() if run_folder(folder).name in ("", "..") else folder


def _with_ranks(folder: Path) -> Sequence[Path]:
    """Return a folder and the folders of ranks in it."""
    return [folder, *filter(has_rank_name, folder.glob("rank*"))]


def _newest_first(folders: Iterable[Path]) -> Sequence[Path]:
    """Return the folders that hold runs, in the order of their last changes."""
    changes = {path: last_change(newest) for path in folders if (newest := newest_in(path))}
    return sorted(changes, key=lambda path: changes[path], reverse=True)


def _ranks_in(run: Path, identity: _Identity) -> dict[int, Path]:
    """Return the ranks of a run in one folder."""
    infos = {path: _info(path) for path in _with_ranks(run) if holds_run(path)}
    return {_rank(info): path for path, info in infos.items() if _identity(run_folder(path), info) == identity}


def _info(folder: Path) -> Any:
    try:
        return read_info(folder / "run.json")
    except RunError:
        return {}


def _identity(run: Path, info: Any) -> _Identity | None:
    resource = _resource(info)
    name = _recorded_name(info) or run.name
    described = [resource.get(key) for key in (names.RUN_ID, names.RUN_GENERATION, names.WORLD_SIZE)]
    identity = _Identity(_START_TIME.sub("", name, count=1), info.get("launch"), *described)
    return identity if identity.run_id and identity.world_size != 1 else None


def _recorded_name(info: Any) -> str:
    """Return the name of the folder that the program asked for; empty if the run does not describe it."""
    record = (info.get("config") or {}).get("record")
    return Path(record).name if isinstance(record, str) else ""


def _rank(info: Any) -> int:
    rank = _resource(info).get(names.RANK)
    return rank if isinstance(rank, int) else 0


def _resource(info: Any) -> Any:
    return info.get("resource") or {}
