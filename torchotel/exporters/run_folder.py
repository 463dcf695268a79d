"""The folder of a run: how a process claims, checks, finds and discards one, and its files of lines."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
from collections.abc import Iterator
from itertools import chain, count, takewhile
from pathlib import Path
from typing import NamedTuple

from torchotel._limits import MAX_INFO_BYTES
from torchotel._semconv import RUN_GENERATION
from torchotel._types import ConfigError
from torchotel._utils.distributed import has_rank_name

RUN_NAME = "run.json"
METRICS_NAME = "metrics.jsonl"
TRACE_NAME = "trace-{:05d}.jsonl"
TRACE_GLOB = "trace-*.jsonl"

_logger = logging.getLogger("torchotel")


class LineFile:
    """Append lines to a new file that only its owner can read.

    Each line is written at once, so that after a crash at most the last line is incomplete.

    Args:
        path: Where it is created.
        fd: Its descriptor, if another process has created it; None: it is created. A last line that is incomplete is
            removed, since readers accept one at the end only.

    Raises:
        FileExistsError: The file exists.
    """

    def __init__(self, path: Path, fd: int | None = None) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600) if fd is None else fd
        self.size = 0 if fd is None else _whole_lines(fd)
        """Bytes."""
        self._cut_to_size()

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._fd

    def append(self, line: bytes) -> None:
        """Write a line and a line break, or nothing if writing fails.

        Raises:
            FileNotFoundError: The file was removed.
            OSError: The disk failed or is full.
        """
        if not os.fstat(self._fd).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "the file was removed", os.fspath(self.path))
        unwritten = memoryview(line + b"\n")
        try:
            while unwritten:
                unwritten = unwritten[os.write(self._fd, unwritten) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._cut_to_size()
            raise
        self.size += len(line) + 1

    def close(self) -> None:
        """Close the file; may be called again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _cut_to_size(self) -> None:
        os.ftruncate(self._fd, self.size)
        os.lseek(self._fd, self.size, os.SEEK_SET)


def _whole_lines(fd: int) -> int:
    """Return the size of a file without a last line that is incomplete."""
    with open(fd, "rb", closefd=False) as file:
        file.seek(0)
        return sum(len(line) for line in file if line.endswith(b"\n"))


class ClaimedFolder(NamedTuple):
    """A folder that no other run can have."""

    path: Path
    metrics: LineFile
    """Its `metrics.jsonl`, which claims the folder."""


def claim_folder(record: Path, rank: str = "", generation: int = 0) -> ClaimedFolder:
    """Claim the folder of a run, or of a rank in it; create it with mode 0700.

    The first folder of `<name>`, `<name>-2`, `<name>-3`, … is claimed that holds no other run. So the ranks of a launch
    are together. A process that has recorded nothing yet may only start the ranks, and they use its folder.

    Args:
        record: The folder of the run.
        rank: Name of the rank's folder in it, see `rank_folder_name`; empty: the run has one process.
        generation: Restarts of the run so far.

    Raises:
        ConfigError: The folder cannot be created.
    """
    record = record.absolute()  # the program may change its working directory
    for run in _candidates(record):
        folder = run / rank
        try:
            if _holds_other_run(run, rank, generation):
                continue
            metrics = _begin(run, folder)
        except (FileExistsError, NotADirectoryError) as error:
            is_file = os.path.lexists(folder) and not folder.is_dir()
            if isinstance(error, NotADirectoryError) or (is_file and run == record):
                raise ConfigError("record", os.fspath(record), "a folder, but a file is there") from error
        except OSError as error:
            takes = f"a folder that can be written to ({error.strerror})"
            raise ConfigError("record", os.fspath(record), takes) from error
        else:
            if run != record:
                _logger.warning(
                    "%s holds a run already, so this run is recorded in %s. To choose the folder, set `record` "
                    "(TORCHOTEL_RECORD) to another one for each run.",
                    record,
                    folder,
                )
            return ClaimedFolder(folder, metrics)
    raise AssertionError("the names do not end")


def check_folder(wanted: Path) -> None:
    """Check that a folder could be claimed; nothing is created.

    Raises:
        ConfigError: The folder, or the first of its parents that exists, is a file or cannot be written to.
    """
    try:
        found = next(folder for folder in (wanted.absolute(), *wanted.absolute().parents) if folder.exists())
    except OSError as error:  # for example, the name is too long
        raise ConfigError("record", os.fspath(wanted), f"a folder that can be written to ({error.strerror})") from error
    if not found.is_dir():
        raise ConfigError("record", os.fspath(wanted), f"a folder, but {found} is a file")
    if not os.access(found, os.W_OK | os.X_OK):
        raise ConfigError("record", os.fspath(wanted), f"a folder that can be written to, but {found} cannot")


def earlier_folders(record: Path, claimed: Path) -> Iterator[Path]:
    """Yield the folders of earlier runs that `claim_folder` has passed over, or of this rank in them.

    Args:
        record: The folder of the run that was passed to `claim_folder`.
        claimed: The folder that it returned.
    """
    rank = claimed.name if has_rank_name(claimed) and not has_rank_name(record) else ""
    own = claimed.parent if rank else claimed
    runs = _candidates(own.with_name(record.name))  # the program may have changed its working directory
    return (run / rank for run in takewhile(lambda run: run != own and run.exists(), runs) if (run / rank).exists())


def _candidates(record: Path) -> Iterator[Path]:
    names = chain((record.name,), (f"{record.name}-{number}" for number in count(2)))
    return map(record.with_name, names)


def _holds_other_run(run: Path, rank: str, generation: int) -> bool:
    """Return whether a folder holds the run of one process, or ranks that the claiming process does not belong to."""
    if not rank:
        return any(map(_has_records, run.glob("rank*")))
    # One of the other ranks tells for all of them, which are those of one launch.
    other = next((path for path in run.glob("rank*") if path.name != rank and has_rank_name(path)), None)
    return _has_records(run) or (other is not None and _is_of_earlier_launch(other, generation))


def _has_records(folder: Path) -> bool:
    files = (path for name in (METRICS_NAME, TRACE_GLOB) for path in folder.glob(name))
    try:
        return any(path.stat().st_size for path in files)
    except FileNotFoundError:  # another process has just deleted its empty run
        return False


def _is_of_earlier_launch(folder: Path, generation: int) -> bool:
    """Return whether the run of a rank has ended, or has had another number of restarts."""
    path, info = folder / RUN_NAME, None
    with contextlib.suppress(OSError, ValueError, RecursionError):  # it was removed, or is not written yet
        if path.is_file():  # opening a named pipe would block for ever
            with path.open("rb") as file:
                info = json.loads(file.read(MAX_INFO_BYTES))
    if not isinstance(info, dict):
        return False
    resource = info.get("resource")
    of_run = resource.get(RUN_GENERATION, generation) if isinstance(resource, dict) else generation
    return bool(info.get("finished") or info.get("error")) or of_run != generation


def _begin(run: Path, folder: Path) -> LineFile:
    """Claim a folder by creating `metrics.jsonl`, in which only one process can succeed.

    Raises:
        FileExistsError: The folder has a run, or the path is a file.
    """
    for path in (run, folder):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (folder / RUN_NAME).exists() or any(folder.glob(TRACE_GLOB)):
        raise FileExistsError
    try:
        return LineFile(folder / METRICS_NAME)
    except FileNotFoundError:  # another process has just deleted its empty run
        return _begin(run, folder)


def discard_folder(folder: Path) -> None:
    """Delete an empty run, and its folder unless that has other files; its parent stays, as other ranks may use it."""
    for name in (RUN_NAME, f".{RUN_NAME}.new", METRICS_NAME):  # a companion may be killed before it renames the new one
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def next_segment(folder: Path) -> Path:
    """Return the path of a new segment of traces, after all others."""
    return folder / TRACE_NAME.format(max(map(segment_number, folder.glob(TRACE_GLOB)), default=0) + 1)


def segment_number(segment: Path) -> int:
    """Return the number of a segment; 0: the program named a file like one."""
    number = segment.stem.partition("-")[2]
    return int(number) if number.isdecimal() else 0
