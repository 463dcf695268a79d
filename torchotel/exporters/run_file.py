"""Write a run to a folder: spans as OTLP/JSON, one line of metrics a step, and its description."""

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
from itertools import chain, count
from math import isfinite
from pathlib import Path
from typing import TypeVar

from torchotel._limits import MAX_RUN_FILE_BYTES
from torchotel._records import GradientNorms, Log, StepRecord, phase_times_s
from torchotel._types import ConfigError
from torchotel._utils.faults import Warn
from torchotel.exporters.base import ExportStats, TraceExporter
from torchotel.exporters.otlp.json_encoder import JsonEncoder
from torchotel.tracing.span import Attributes, Trace


class LineFile:
    """Append lines to a new file that only its owner can read.

    Each line is written at once, so that after a crash all but the last are whole.

    Raises:
        FileExistsError: If the file is there already.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        """Bytes."""
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def append(self, line: bytes) -> None:
        """Write a line and its break; nothing of the line stays if writing fails.

        Raises:
            FileNotFoundError: The file has been removed, so lines in it are lost.
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
                os.ftruncate(self._fd, self.size)
                os.lseek(self._fd, self.size, os.SEEK_SET)
            raise
        self.size += len(line) + 1

    def close(self) -> None:
        """Close; again is no harm."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


SEGMENT_BYTES = 8 * 1024 * 1024
MAX_LINE_SPANS = 4000
"""A longer trace goes into several lines, some 2 MB each, so that readers need not hold it whole."""
RUN_NAME = "run.json"
METRICS_NAME = "metrics.jsonl"
TRACE_NAME = "trace-{:05d}.jsonl"
TRACE_GLOB = "trace-*.jsonl"

Result = TypeVar("Result")
_logger = logging.getLogger("torchotel")


@dataclass(slots=True)
class _Segment:
    file: LineFile
    spans: int = 0


class RunFile(TraceExporter):
    """Keep a run in a folder of bounded size: beyond it the oldest segment of traces is deleted, whole.

    `metrics.jsonl` may take half of the bound, so that there is always room for the newest traces. What was
    deleted stands in `run.json` under `recording`. A disk that fails ends the recording with a warning, and
    nothing is raised but by the constructor.

    Args:
        folder: Created with mode 0700 if it does not exist. If it holds a run, a free name beside it is used.
        resource: Attributes of the resource.
        version: Of torchotel, for the scope.
        stats: Where spans and failures are counted; a span counts as exported when it is written.
        segment_bytes: Size at which a new segment is begun.
        limit_bytes: Size of all files.

    Raises:
        ConfigError: If the folder cannot be made.
    """

    def __init__(
        self,
        folder: Path,
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
        self._segments: deque[_Segment] = deque()
        self._begun = 0
        self._bytes = 0
        """Size of the line files."""
        self._run: dict[str, object] = {}
        self._deleted = {"segments_deleted": 0, "spans_deleted": 0, "steps_dropped": 0}
        self._open = True
        self._lost = False
        self._warn = Warn()
        self.folder, self._metrics = _claim(folder.absolute())  # the program may change its working directory
        self._attempt(self._write_run, None)

    def export(self, trace: Trace) -> None:
        """Write one trace as a line, or as several if it has more than `MAX_LINE_SPANS` spans."""
        for part in _parts(trace):
            if not self._attempt(partial(self._write_trace, part), default=False):
                self._lost = True
                self.stats.dropped(len(part.spans))

    def step(self, summary: Mapping[str, object]) -> None:
        """Write one step's line of metrics; a non-finite number becomes null."""
        self._attempt(lambda: self._write_step(summary), None)

    def describe(self, run: Mapping[str, object]) -> None:
        """Write `run.json`, in place of what it said; a non-finite number becomes null."""
        self._run = dict(run)
        self._attempt(self._write_run, None)

    def flush(self, deadline_s: float) -> bool:  # all is written when `export` returns
        """Say whether every trace since the last call was written."""
        lost, self._lost = self._lost, False
        return not lost

    def shutdown(self, deadline_s: float) -> None:  # nothing waits
        """Close the files."""
        self._attempt(self._write_run, None)
        self._close()

    def discard(self) -> None:
        """Take the run back where nothing was recorded; the folder goes, unless it holds something else."""
        self._close()
        (self.folder / RUN_NAME).unlink(missing_ok=True)
        (self.folder / METRICS_NAME).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    @property
    def empty(self) -> bool:
        """Whether nothing was recorded."""
        return self._bytes == 0 and self._deleted["steps_dropped"] == 0

    @cached_property
    def _encoder(self) -> JsonEncoder:
        """The encoder of all traces, made with the first: by then the rank is known."""
        return JsonEncoder(self._resource, self._version)

    def _attempt(self, write: Callable[[], Result], default: Result) -> Result:
        """Run a write unless the recording has ended; a failing disk ends it."""
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
        except Exception as error:  # noqa: BLE001  # the next record may be good
            self.stats.error(type(error).__name__)
            self._warn("Could not write a record to the run file; further ones are only counted", error=error)
        return default

    def _write_trace(self, trace: Trace) -> bool:
        line = self._encoder.encode(trace)
        if not self._make_room(len(line) + 1):
            return False
        if not self._segments or self._segments[-1].file.size + len(line) >= self._segment_bytes:
            self._begin_segment()
        segment = self._segments[-1]
        segment.file.append(line)
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
        new.replace(self.folder / RUN_NAME)  # a reader sees the old or the new, never half

    def _begin_segment(self) -> None:
        if self._segments:
            self._segments[-1].file.close()
        self._begun += 1
        self._segments.append(_Segment(LineFile(self.folder / TRACE_NAME.format(self._begun))))

    def _make_room(self, size: int) -> bool:
        deleted = False
        while self._segments and self._bytes + size > self._limit_bytes:
            segment = self._segments.popleft()
            segment.file.close()
            segment.file.path.unlink(missing_ok=True)
            self._bytes -= segment.file.size
            self._deleted["segments_deleted"] += 1
            self._deleted["spans_deleted"] += segment.spans
            deleted = True
        if deleted:
            self._write_run()
        return self._bytes + size <= self._limit_bytes

    def _close(self) -> None:
        self._open = False
        for file in (self._metrics, *(segment.file for segment in self._segments)):
            file.close()


def _parts(trace: Trace) -> Iterator[Trace]:
    if len(trace.spans) <= MAX_LINE_SPANS:
        yield trace
        return
    for start in range(0, len(trace.spans), MAX_LINE_SPANS):
        spans = trace.spans[start : start + MAX_LINE_SPANS]
        # Only the root, which is the first span, can have a remote parent.
        yield replace(trace, spans=spans, remote_parent=trace.remote_parent and start == 0)


def _claim(wanted: Path) -> tuple[Path, LineFile]:
    """Claim the folder or, if a run is in it, the first free one of `<name>-2`, `<name>-3`, …."""
    names = chain((wanted.name,), (f"{wanted.name}-{number}" for number in count(2)))
    for folder in map(wanted.with_name, names):
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
            return folder, metrics
    raise AssertionError("the names do not end")


def _begin(folder: Path) -> LineFile:
    """Claim the folder: of several processes that want it only one can create `metrics.jsonl`.

    Raises:
        FileExistsError: A run or a file is there.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    if (folder / RUN_NAME).exists() or any(folder.glob(TRACE_GLOB)):
        raise FileExistsError
    try:
        return LineFile(folder / METRICS_NAME)
    except FileNotFoundError:
        raise FileExistsError from None  # another process had claimed the folder, and just removed its empty run


def to_json(value: object, indent: int | None = None) -> bytes:
    """Write JSON that every reader takes: a non-finite number is null, an unknown object its `str`."""
    text = json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, indent=indent)
    return text.encode("utf-8", "replace")


def _plain(value: object) -> object:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [_plain(item) for item in value]
    return str(value)


def unit_line(unit: StepRecord, trace_id: int, nonfinite: Sequence[str]) -> dict[str, object]:
    """Describe a step or an evaluation: duration, phases, what was logged, norms; times are in seconds."""
    line: dict[str, object] = {
        "kind": unit.kind,
        "number": unit.number,
        "time_unix_nano": str(unit.start_ns + unit.unix_offset_ns),
        "duration_s": (unit.end_ns - unit.start_ns) / 1e9,
        "phases": phase_times_s(unit),
        "detailed": unit.detailed,
        "folded": unit.folded,
        "trace_id": f"{trace_id:032x}",
        "error": _error(unit),
    }
    if unit.folded:
        line["folded_s"] = unit.folded_ns / 1e9
    if unit.gap_ns:
        line["gap_s"] = unit.gap_ns / 1e9
    if unit.kind == "evaluation":
        line["grad"], line["training"] = unit.grad, unit.training
    if unit.values:
        line["values"] = unit.values
    if unit.gradients is not None:
        line["gradient_norm"] = unit.gradients.total
        line["gradient_norms"] = _by_model(unit.gradients)
    if unit.tensor_gradients:
        line["tensor_gradient_norms"] = {gradient.name: gradient.norm for gradient in unit.tensor_gradients}
    if unit.memory:
        line["memory"] = [memory._asdict() for memory in unit.memory]
    if nonfinite:
        line["nonfinite"] = nonfinite
    return line


def log_line(log: Log) -> dict[str, object]:
    """Describe what was logged when its step had been handed over."""
    return {"kind": "log", "number": log.step, "time_unix_nano": str(log.unix_ns), "values": log.values}


def _error(unit: StepRecord) -> dict[str, object] | None:
    """Describe what the unit failed with, and the innermost phase that raised it; None for unknown."""
    if unit.error is None:
        return None
    phase = next((phase.kind for phase in reversed(unit.phases) if phase.error == unit.error), None)
    return {**unit.error._asdict(), "phase": phase}


def _by_model(gradients: GradientNorms) -> dict[str, dict[str, float]]:
    models: dict[str, dict[str, float]] = {}
    for module, norm in gradients.modules:
        models.setdefault(module.model, {})[module.path] = norm
    return models
