"""The steps without a record, in a file of the run folder, in case the companion ends together with the training.

The next process that records to the same name finds the file. It sends the traces of these steps, and adds them to the
files of their run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import queue
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from torchotel._records import StepRecord
from torchotel._utils.faults import Guard
from torchotel._utils.gil import GilYielder
from torchotel.exporters.otlp.json_encoder import JsonEncoder
from torchotel.exporters.otlp.json_to_protobuf import FOREIGN
from torchotel.exporters.otlp.replay import Replay
from torchotel.exporters.otlp.transport import Transport
from torchotel.exporters.run_file import record_line, to_json
from torchotel.exporters.run_folder import METRICS_NAME, LineFile, next_segment
from torchotel.tracing.call_tree import CallTreeBuilder
from torchotel.tracing.span import SpanContextSource
from torchotel.tracing.trace_builder import TraceBuilder, root_attributes, trace_attributes

UNSENT_NAME: Final = "unsent.jsonl"
TRACE_KEY: Final = "trace"
"""The key of a trace in the line of its step."""
UNREADABLE_NAME: Final = "unsent-unreadable.jsonl"

SENT = (
    "%s ended without a shutdown. Its steps without a record were exported now (%d spans). If earlier steps did not "
    "arrive, `torchotel export --to` sends them"
)
REJECTED = "%s ended without a shutdown. The endpoint rejected %d spans of its last steps: %s"
NOT_SENT = (
    "%s ended without a shutdown, and its last steps could not be exported to %s: %s. The next run that records to the "
    "same name tries again. Check that the endpoint answers"
)
UNUSABLE = "The last steps of %s could not be exported, because its files cannot be used (%s). Check their permissions"
NOT_ADDED = "The last steps of %s were exported, but they are not in its files (%s). Make room in the folder"
NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP}
"""Errors of a file system without locks."""
IS_FOREIGN = "%s holds a line that torchotel does not write (%s) and is not exported. It is renamed to %s"

Line: TypeAlias = dict[str, Any]

_logger = logging.getLogger("torchotel")


class UnsentFile:
    """The file of the steps that have no record yet.

    It is locked as long as a process has the descriptor open: the training process, and its companion, which writes.

    Args:
        path: The file in the run folder.
        fd: Its descriptor, if another process has created it; None: it is created and locked.

    Raises:
        OSError: The file cannot be created or locked.
    """

    def __init__(self, path: Path, fd: int | None = None) -> None:
        self.path = path
        self._fd = _create_locked(path) if fd is None else fd
        self._next: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._is_idle, self._has_thread = True, False

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._fd

    def write(self, lines: Iterable[bytes]) -> bool:
        """Replace the lines; return False, and do nothing, if earlier lines are still being written.

        Writing is slow if the disk is, so it has a thread of its own.

        Raises:
            RuntimeError: No thread can be started.
        """
        if not self._has_thread:
            threading.Thread(target=self._run, name="torchotel-unsent", daemon=True).start()
            self._has_thread = True
        is_idle = self._is_idle
        if is_idle:
            self._is_idle = False
            self._next.put(b"".join(line + b"\n" for line in lines))
        return is_idle

    def _run(self) -> None:
        while True:
            content = self._next.get()
            with contextlib.suppress(OSError):  # the run file warns of a full disk
                os.ftruncate(self._fd, 0)  # first: a part of the old lines after the new ones could not be read
                os.pwrite(self._fd, content, 0)
            self._is_idle = True

    def remove(self) -> None:
        """Remove the file: all steps have a record, or the training goes on without a companion."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the descriptor of this process; may be called again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _create_locked(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        path.unlink(missing_ok=True)
        raise
    return fd


def encode_unsent(
    record: StepRecord, builder: TraceBuilder, id_source: SpanContextSource, encoder: JsonEncoder
) -> bytes:
    """Encode a step that has no record yet: the line of the run file, with the trace if it is sampled.

    Args:
        record: The step or evaluation, without module calls.
        builder: Builds the trace.
        id_source: Fixes the ids of the step's span, and decides whether it is sampled.
        encoder: Encodes the trace.
    """
    attributes = root_attributes(record, None if record.error is None else "error", ())
    start_ns = record.start_ns + record.unix_offset_ns
    root = id_source.start(
        builder.shared.root_name(record),
        None,
        start_ns,
        {**trace_attributes(record), **attributes},
        trace_id=builder.shared.trace_id(record.alignment),
    )
    line = record_line(record, root.trace_id, ())
    if root.sampled or (record.error is not None and id_source.keeps_late):
        tree = CallTreeBuilder(GilYielder()).build(record)
        line[TRACE_KEY] = json.loads(encoder.encode(builder.build(record, tree, root, attributes)))
    return to_json(line)


def start_finishing(
    earlier: Iterable[Path], make_transport: Callable[[], Transport | None], guard: Guard
) -> threading.Thread | None:
    """Finish earlier runs that have steps without a record, on a thread; None: there are none, or nothing can be sent.

    Args:
        earlier: The folders of earlier runs, some of which may still live.
        make_transport: Returns the transport of traces; None: traces are not sent.
        guard: Counts internal errors.
    """
    folders = [folder for folder in earlier if (folder / UNSENT_NAME).is_file()]
    transport = make_transport() if folders else None
    if transport is None:
        return None
    run = guard.guarded(finish_runs)
    thread = threading.Thread(target=run, args=(folders, transport), name="torchotel-unfinished", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread can be started: the next run sends them
        transport.close()
        return None
    return thread


def finish_runs(folders: Iterable[Path], transport: Transport) -> None:
    """Send the traces of the steps without a record, and add the steps to the files of their runs, which have ended.

    If a run lives, or another process does the same now, its folder stays as it is. If sending fails, the file remains
    for the next run.

    Args:
        folders: The run folders.
        transport: Sends the traces, and is closed at the end.
    """
    with contextlib.closing(transport):
        for folder in folders:
            try:
                with contextlib.ExitStack() as stack:
                    _finish_run(folder, Replay(transport), stack)
            except (FileNotFoundError, BlockingIOError):  # another process has just done it, or the run lives
                continue
            except OSError as error:
                if error.errno not in NO_LOCKS:  # without locks it is unknown whether the run lives
                    _logger.warning(UNUSABLE, folder, error)


def _finish_run(folder: Path, replay: Replay, stack: contextlib.ExitStack) -> None:
    """Send and add the steps of one run.

    Raises:
        FileNotFoundError: A file is missing: another process has just done it.
        BlockingIOError: The run lives.
        OSError: A file cannot be used, or not be locked.
    """
    unsent = _open_own(folder / UNSENT_NAME, stack)
    fcntl.flock(unsent, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if not os.fstat(unsent).st_nlink:
        raise FileNotFoundError
    lines = [*_read_lines(unsent)]
    metrics = LineFile(folder / METRICS_NAME, _open_own(folder / METRICS_NAME, stack))
    try:
        last_recorded = _last_numbers(_read_lines(metrics.fileno())) if lines else {}
        lines = [line for line in lines if int(line["number"]) > last_recorded[line["kind"]]]
        traces = [line.pop(TRACE_KEY) for line in lines if TRACE_KEY in line]
        is_sent = all(map(replay.add, traces)) and replay.push()
    except FOREIGN as error:
        (folder / UNSENT_NAME).replace(folder / UNREADABLE_NAME)
        _logger.warning(IS_FOREIGN, folder / UNSENT_NAME, error, UNREADABLE_NAME)
        return
    if not is_sent:
        _logger.warning(NOT_SENT, folder, replay.transport.endpoint, replay.failure)
        return
    (folder / UNSENT_NAME).unlink()  # first: what was exported must not be exported again
    if replay.rejected:
        _logger.warning(REJECTED, folder, replay.rejected, replay.failure)
    if replay.arrived:
        _logger.warning(SENT, folder, replay.arrived)
    try:
        _add(folder, metrics, lines, traces)
    except OSError as error:
        _logger.warning(NOT_ADDED, folder, error)


def _add(folder: Path, metrics: LineFile, lines: Iterable[Line], traces: Sequence[Any]) -> None:
    if traces:
        with contextlib.closing(LineFile(next_segment(folder))) as segment:
            try:
                segment.append(b"\n".join(map(to_json, traces)))
            except OSError:
                segment.path.unlink(missing_ok=True)
                raise
    for line in lines:
        metrics.append(to_json(line))


def _open_own(path: Path, stack: contextlib.ExitStack) -> int:
    """Open a regular file of this user until the stack is closed.

    Raises:
        OSError: The file is missing, a link, or not a regular file of this user.
    """
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe would block
    stack.callback(os.close, fd)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(errno.EACCES, "not a file of this user", os.fspath(path))
    return fd


def _read_lines(fd: int) -> Iterator[Line]:
    """Read JSON objects, one a line; the last line may be incomplete."""
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(line)
                if isinstance(value, dict):
                    yield value


def _last_numbers(lines: Iterable[Line]) -> dict[str, int]:
    """Return the last numbers of records: the companion may have recorded steps after it wrote the unsent ones."""
    last = {"step": -1, "evaluation": -1}
    for line in lines:
        kind, number = line.get("kind"), line.get("number")
        if kind in last and isinstance(number, int):
            last[kind] = max(last[kind], number)
    return last
