"""Write a run to a folder: spans as OTLP/JSON, a line of metrics per step, and a description of the run."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, count, takewhile
from pathlib import Path
from typing import NamedTuple, TypeVar

from torchotel._limits import MAX_RUN_FILE_BYTES
from torchotel._records import GradientNorms, Log, StepRecord, phase_times_s, plain
from torchotel._types import ConfigError
from torchotel._utils.faults import Warn
from torchotel.exporters.base import ExportStats, TraceExporter
from torchotel.exporters.otlp.json_encoder import JsonEncoder
from torchotel.tracing.span import Attributes, Trace


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


SEGMENT_BYTES = 8 * 1024 * 1024
MAX_LINE_SPANS = 4000
"""Spans of a line, about 2 MB; a longer trace has several lines, so that readers need less memory."""
RUN_NAME = "run.json"
METRICS_NAME = "metrics.jsonl"
TRACE_NAME = "trace-{:05d}.jsonl"
TRACE_GLOB = "trace-*.jsonl"

Result = TypeVar("Result")
_logger = logging.getLogger("torchotel")


@dataclass(slots=True)
class _Segment:
    """A file of traces; only the newest one is open."""

    path: Path
    size: int = 0
    spans: int = 0


class ClaimedFolder(NamedTuple):
    """A folder that no other run can have."""

    path: Path
    metrics: LineFile
    """Its `metrics.jsonl`, which claims the folder."""


class RunFile(TraceExporter):
    """Record a run in a folder of bounded size; beyond the bound, the oldest segment of traces is deleted.

    `metrics.jsonl` may have half of this size, so that there is always room for the newest traces. `run.json` counts
    deletions under `recording`. If writing fails, the recording ends with a warning. Nothing raises.

    Args:
        claimed: The folder, see `claim_folder`.
        resource: Attributes of the resource.
        version: Version of torchotel, for the scope.
        stats: Counts spans and failures; a span counts as exported when it is written.
        segment_bytes: Size of a segment.
        limit_bytes: Size of all files.
    """

    def __init__(
        self,
        claimed: ClaimedFolder,
        *,
        resource: Attributes,
        version: str,
        stats: ExportStats | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        limit_bytes: int = MAX_RUN_FILE_BYTES,
    ) -> None:
        self.stats = stats or ExportStats()
        self._resource, self._version = resource, version
        self._segment_bytes = segment_bytes
        self._limit_bytes = limit_bytes
        self._segments = deque(map(_measure, sorted(claimed.path.glob(TRACE_GLOB), key=_number)))
        """The segments in order, first those of a writer that has crashed."""
        self._traces: LineFile | None = None
        """The newest segment, if this writer has started it."""
        self._bytes = sum(segment.size for segment in self._segments) + claimed.metrics.size
        """Size of all files of lines."""
        self._run: dict[str, object] = {}
        self._deleted = _read_deleted(claimed.path)
        self._open = True
        self._has_dropped = False
        self._warn = Warn()
        self.folder, self._metrics = claimed
        self._attempt(self._write_run, None)

    def export(self, trace: Trace) -> None:
        """Write a trace as one line, or as several lines of at most `MAX_LINE_SPANS` spans."""
        for part in _parts(trace):
            if not self._attempt(partial(self._write_trace, part), default=False):
                self._has_dropped = True
                self.stats.dropped(len(part.spans))

    def step(self, summary: Mapping[str, object]) -> None:
        """Write the line of a step to `metrics.jsonl`; a non-finite number becomes null."""
        self._attempt(lambda: self._write_step(summary), None)

    def describe(self, run: Mapping[str, object]) -> None:
        """Replace `run.json`; a non-finite number becomes null."""
        self._run = dict(run)
        self._attempt(self._write_run, None)

    def flush(self, deadline_s: float) -> bool:
        """Return whether all traces since the last call were written."""
        dropped, self._has_dropped = self._has_dropped, False
        return not dropped

    def shutdown(self, deadline_s: float) -> None:
        """Close the files."""
        self._attempt(self._write_run, None)
        self._close()

    def discard(self) -> None:
        """Delete an empty run, and the folder unless it has other files."""
        self._close()
        discard_folder(self.folder)

    @property
    def empty(self) -> bool:
        """Return whether nothing was recorded."""
        return self._bytes == 0 and self._deleted["steps_dropped"] == 0

    @cached_property
    def _encoder(self) -> JsonEncoder:
        """The encoder of all traces, created with the first one, when the rank is known."""
        return JsonEncoder(self._resource, self._version)

    def _attempt(self, write: Callable[[], Result], default: Result) -> Result:
        """Call `write` unless the recording has ended; an OSError ends the recording."""
        if not self._open:
            return default
        try:
            return write()
        except OSError as error:
            self.stats.error(type(error).__name__)
            _logger.warning(
                "Could not write to the run file %s: %s. Training is not affected; nothing more is recorded. "
                "Make room, or record to another folder.",
                self.folder,
                error,
            )
            self._close()
        except Exception as error:  # noqa: BLE001  # the next record may succeed
            self.stats.error(type(error).__name__)
            self._warn("Could not write a record to the run file; further ones are only counted", error=error)
        return default

    def _write_trace(self, trace: Trace) -> bool:
        line = self._encoder.encode(trace)
        if not self._make_room(len(line) + 1):
            return False
        if self._traces is None or self._traces.size + len(line) >= self._segment_bytes:
            self._traces = self._begin_segment()
        self._traces.append(line)
        segment = self._segments[-1]
        segment.size = self._traces.size
        segment.spans += len(trace.spans)
        self._bytes += len(line) + 1
        self.stats.exported(len(trace.spans), (trace.trace_id,))
        return True

    def _write_step(self, summary: Mapping[str, object]) -> None:
        line = to_json(summary)
        if self._metrics.size + len(line) >= self._limit_bytes // 2 or not self._make_room(len(line) + 1):
            self._deleted["steps_dropped"] += 1
            return
        self._metrics.append(line)
        self._bytes += len(line) + 1

    def _write_run(self) -> None:
        run = {**self._run, "recording": self._deleted}
        new = self.folder / f".{RUN_NAME}.new"
        new.unlink(missing_ok=True)
        file = LineFile(new)
        try:
            file.append(to_json(run, indent=1))
        finally:
            file.close()
        new.replace(self.folder / RUN_NAME)  # atomic: readers see the old or the new file

    def _begin_segment(self) -> LineFile:
        if self._traces is not None:
            self._traces.close()
        file = LineFile(next_segment(self.folder))
        self._segments.append(_Segment(file.path))
        return file

    def _make_room(self, size: int) -> bool:
        deleted = False
        while self._segments and self._bytes + size > self._limit_bytes:
            segment = self._segments.popleft()
            segment.path.unlink(missing_ok=True)
            if not self._segments and self._traces is not None:
                self._traces.close()
                self._traces = None
            self._bytes -= segment.size
            self._deleted["segments_deleted"] += 1
            self._deleted["spans_deleted"] += segment.spans
            deleted = True
        if deleted:
            self._write_run()
        return self._bytes + size <= self._limit_bytes

    def _close(self) -> None:
        self._open = False
        self._metrics.close()
        if self._traces is not None:
            self._traces.close()


def next_segment(folder: Path) -> Path:
    """Return the path of a new segment of traces, after all others."""
    return folder / TRACE_NAME.format(max(map(_number, folder.glob(TRACE_GLOB)), default=0) + 1)


def _number(segment: Path) -> int:
    """Return the number of a segment; 0: the program named a file like one."""
    number = segment.stem.partition("-")[2]
    return int(number) if number.isdecimal() else 0


def _measure(segment: Path) -> _Segment:
    """Return the size and the number of spans of a segment of a writer that has crashed."""
    lines = segment.read_bytes()
    return _Segment(segment, len(lines), lines.count(b'"startTimeUnixNano":'))  # each span has one


def _read_deleted(folder: Path) -> dict[str, int]:
    """Return the counts under `recording`, which a writer that has crashed may have begun."""
    deleted = {"segments_deleted": 0, "spans_deleted": 0, "steps_dropped": 0}
    with contextlib.suppress(OSError, ValueError, LookupError):
        deleted.update(json.loads((folder / RUN_NAME).read_bytes())["recording"])
    return deleted


def _parts(trace: Trace) -> Iterator[Trace]:
    if len(trace.spans) <= MAX_LINE_SPANS:
        yield trace
        return
    for start in range(0, len(trace.spans), MAX_LINE_SPANS):
        spans = trace.spans[start : start + MAX_LINE_SPANS]
        # Only the root, which is the first span, can have a remote parent.
        yield replace(trace, spans=spans, remote_parent=trace.remote_parent and start == 0)


def claim_folder(wanted: Path) -> ClaimedFolder:
    """Claim a folder, or the first free one of `<name>-2`, `<name>-3`, … if it has a run; create it with mode 0700.

    Raises:
        ConfigError: The folder cannot be created.
    """
    wanted = wanted.absolute()  # the program may change its working directory
    for folder in _candidates(wanted):
        try:
            metrics = _begin(folder)
        except FileExistsError as error:
            if folder == wanted and not folder.is_dir():
                raise ConfigError("record", os.fspath(wanted), "a folder, and a file is there") from error
        except OSError as error:
            takes = f"a folder that can be written to ({error.strerror})"
            raise ConfigError("record", os.fspath(wanted), takes) from error
        else:
            if folder != wanted:
                _logger.warning(
                    "%s holds a run already, so this run is recorded in %s. Set `record` (TORCHOTEL_RECORD) to a new "
                    "folder for each run to choose its name.",
                    wanted,
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
        raise ConfigError("record", os.fspath(wanted), f"a folder, and {found} is a file")
    if not os.access(found, os.W_OK | os.X_OK):
        raise ConfigError("record", os.fspath(wanted), f"a folder that can be written to, and {found} cannot")


def earlier_folders(wanted: Path, claimed: Path) -> Iterator[Path]:
    """Yield the folders of earlier runs that `claim_folder` has passed over.

    Args:
        wanted: The path that was passed to `claim_folder`.
        claimed: The folder that it returned.
    """
    earlier = _candidates(claimed.with_name(wanted.name))  # the program may have changed its working directory
    return takewhile(lambda folder: folder != claimed and folder.exists(), earlier)


def _candidates(wanted: Path) -> Iterator[Path]:
    names = chain((wanted.name,), (f"{wanted.name}-{number}" for number in count(2)))
    return map(wanted.with_name, names)


def _begin(folder: Path) -> LineFile:
    """Claim a folder by creating `metrics.jsonl`, in which only one process can succeed.

    Raises:
        FileExistsError: The folder has a run, or the path is a file.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    if (folder / RUN_NAME).exists() or any(folder.glob(TRACE_GLOB)):
        raise FileExistsError
    try:
        return LineFile(folder / METRICS_NAME)
    except FileNotFoundError:
        raise FileExistsError from None  # another process has just deleted its empty run


def discard_folder(folder: Path) -> None:
    """Delete an empty run, and its folder unless that has other files."""
    for name in (RUN_NAME, f".{RUN_NAME}.new", METRICS_NAME):  # a companion may be killed before it renames the new one
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def to_json(value: object, indent: int | None = None) -> bytes:
    """Encode strict JSON: a non-finite number becomes null, another object its `str`."""
    text = json.dumps(plain(value, finite=True), ensure_ascii=False, allow_nan=False, indent=indent)
    return text.encode("utf-8", "replace")


def record_line(record: StepRecord, trace_id: int, nonfinite: Sequence[str]) -> dict[str, object]:
    """Return the line of a step or an evaluation: duration, phases, logged values and norms; times in seconds."""
    line: dict[str, object] = {
        "kind": record.kind,
        "number": record.number,
        "time_unix_nano": str(record.start_ns + record.unix_offset_ns),
        "duration_s": (record.end_ns - record.start_ns) / 1e9,
        "phases": phase_times_s(record),
        "detailed": record.detailed,
        "folded": record.folded,
        "trace_id": f"{trace_id:032x}",
        "error": _error(record),
    }
    if record.folded:
        line["folded_s"] = record.folded_ns / 1e9
    if record.gap_ns:
        line["gap_s"] = record.gap_ns / 1e9
    if record.kind in {"evaluation", "stall"}:
        line["grad"], line["training"] = record.grad, record.training
    if record.values:
        line["values"] = record.values
    if record.gradients is not None:
        line["gradient_norm"] = record.gradients.total
        line["gradient_norms"] = _by_model(record.gradients)
    if record.tensor_gradients:
        line["tensor_gradient_norms"] = {gradient.name: gradient.norm for gradient in record.tensor_gradients}
    if record.memory:
        line["memory"] = [memory._asdict() for memory in record.memory]
    if nonfinite:
        line["nonfinite"] = nonfinite
    return line


def log_line(log: Log) -> dict[str, object]:
    """Return the line of values that were logged after their step was recorded."""
    return {"kind": "log", "number": log.step, "time_unix_nano": str(log.unix_ns), "values": log.values}


def _error(record: StepRecord) -> dict[str, object] | None:
    """Return the error of a record and the innermost phase that raised it; phase None: unknown."""
    if record.error is None:
        return None
    phase = next((phase.kind for phase in reversed(record.phases) if phase.error == record.error), None)
    return {**record.error._asdict(), "phase": phase}


def _by_model(gradients: GradientNorms) -> dict[str, dict[str, float]]:
    models: dict[str, dict[str, float]] = {}
    for module, norm in gradients.modules:
        models.setdefault(module.model, {})[module.path] = norm
    return models
