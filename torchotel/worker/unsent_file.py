"""The steps without a record, in a file of the run folder, in case the companion ends together with the training.

The next process that records to the same name finds the file. It sends the traces of these steps, and adds them to the
files of their run.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import queue
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from torchotel._limits import MAX_LINE_BYTES
from torchotel._records import StepRecord
from torchotel._utils.gil import GilYielder
from torchotel.exporters.otlp.json_encoder import JsonEncoder
from torchotel.exporters.otlp.replay import Replay
from torchotel.exporters.run_file import METRICS_NAME, LineFile, next_segment, record_line, to_json
from torchotel.tracing.call_tree import CallTreeBuilder
from torchotel.tracing.span import SpanContextSource
from torchotel.tracing.trace_builder import TraceBuilder, root_attributes, root_name, trace_attributes

UNSENT_NAME: Final = "unsent.jsonl"
TRACE_KEY: Final = "trace"
"""The key of a trace in the line of its step."""
_TAIL_BYTES: Final = 1 << 16
"""The end of `metrics.jsonl` that is searched for the numbers of the last records."""
_FOREIGN: Final = (TypeError, ValueError, AttributeError, KeyError, OverflowError, RecursionError)
"""What a file raises that torchotel has not written."""

SENT = "%s ended without a shutdown. Its last steps were exported now (%d spans)"
NOT_SENT = (
    "%s ended without a shutdown, and its last steps could not be exported: %s. Send the run with `torchotel export "
    "--to ENDPOINT`; the next run that records to the same name tries again"
)
NOT_ADDED = "The last steps of %s could not be added to its files: %s. Make room in the folder"

Line: TypeAlias = dict[str, Any]

_logger = logging.getLogger("torchotel")


class UnsentFile:
    """The file of the steps that have no record yet; while its writer lives, the file is locked.

    Writing is slow if the disk is, so it has a thread of its own, which skips lines while it writes earlier ones.

    Args:
        folder: The run folder.

    Raises:
        OSError: The file cannot be created or locked.
    """

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / UNSENT_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise
        self._next: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._is_idle = True
        threading.Thread(target=self._run, name="torchotel-unsent", daemon=True).start()

    def write(self, lines: Iterable[bytes]) -> bool:
        """Replace the lines; return False, and do nothing, if earlier lines are still being written."""
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


def remove_unsent(folder: Path) -> None:
    """Remove the file of the steps without a record: all steps have one."""
    with contextlib.suppress(OSError):
        (folder / UNSENT_NAME).unlink(missing_ok=True)


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
    root = id_source.start(root_name(record), None, start_ns, {**trace_attributes(record), **attributes})
    line = record_line(record, root.trace_id, ())
    if root.sampled or (record.error is not None and id_source.keeps_late):
        tree = CallTreeBuilder(GilYielder()).build(record)
        line[TRACE_KEY] = json.loads(encoder.encode(builder.build(record, tree, root, attributes)))
    return to_json(line)


def has_unsent(folder: Path) -> bool:
    """Return whether a folder has the file of a companion, which may still live."""
    return (folder / UNSENT_NAME).is_file()


def finish_runs(folders: Iterable[Path], replay: Replay) -> None:
    """Send the traces of the steps without a record, and add the steps to the files of their runs, which have ended.

    If the companion of a run lives, or another process does the same now, its folder stays as it is. If sending fails,
    the file remains for the next run.

    Args:
        folders: The run folders.
        replay: Sends the traces, and is closed at the end.
    """
    with contextlib.closing(replay.transport):
        for folder in folders:
            _finish_run(folder, replay)


def _finish_run(folder: Path, replay: Replay) -> None:
    before = replay.arrived
    with contextlib.ExitStack() as stack:
        try:
            content = _take(folder / UNSENT_NAME, stack)
        except OSError:  # locked, removed, or not a file of this user
            return
        try:
            lines = list(_without_record(content, folder / METRICS_NAME))
            traces = [line.pop(TRACE_KEY) for line in lines if TRACE_KEY in line]
            sent = all(map(replay.add, traces)) and replay.push()
        except _FOREIGN as error:
            _logger.warning(NOT_SENT, folder, f"{UNSENT_NAME} holds a line that torchotel does not write ({error})")
            return
        if not sent:
            _logger.warning(NOT_SENT, folder, replay.failure)
            return
        try:
            _add(folder, lines, traces)
        except OSError as error:
            _logger.warning(NOT_ADDED, folder, error)
        else:
            remove_unsent(folder)
        if replay.arrived > before:
            _logger.warning(SENT, folder, replay.arrived - before)


def _take(path: Path, stack: contextlib.ExitStack) -> bytes:
    """Lock and read a file of this user.

    Raises:
        OSError: The file is missing or locked, or is not a regular file of this user.
    """
    file = stack.enter_context(os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb"))
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or not found.st_nlink:
        raise PermissionError(path)
    return file.read(MAX_LINE_BYTES)


def _without_record(content: bytes, metrics: Path) -> Iterator[Line]:
    """Yield the lines of the steps that have no record: the companion may have recorded some of them later."""
    last = {"step": -1, "evaluation": -1}
    with contextlib.suppress(FileNotFoundError), metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - _TAIL_BYTES))
        for line in _parsed(file.read()):
            if line.get("kind") in last:
                last[line["kind"]] = max(last[line["kind"]], int(line["number"]))
    for line in _parsed(content):
        if int(line["number"]) > last[line["kind"]]:
            yield line


def _parsed(content: bytes) -> Iterator[Line]:
    """Parse lines; the first and the last one may be incomplete."""
    for line in content.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line)
            if isinstance(value, dict):
                yield value


def _add(folder: Path, lines: Sequence[Line], traces: Sequence[Line]) -> None:
    """Add steps and traces to the files of a run.

    Raises:
        OSError: A file cannot be written.
    """
    if traces:
        with contextlib.closing(LineFile(next_segment(folder))) as segment:
            segment.append(b"\n".join(map(to_json, traces)))
    path = folder / METRICS_NAME
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    with contextlib.closing(LineFile(path, fd)) as metrics:
        for line in lines:
            metrics.append(to_json(line))
