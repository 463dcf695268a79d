"""Write a run to a folder: spans as OTLP/JSON, a line of metrics per step, and a description of the run."""

from __future__ import annotations

import contextlib
import json
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

from torchotel._limits import MAX_RUN_FILE_BYTES
from torchotel._records import GradientNorms, Log, StepRecord, phase_times_s, phase_waits_s, plain
from torchotel._utils.faults import Warn
from torchotel.exporters.base import ExportStats, TraceExporter
from torchotel.exporters.otlp.json_encoder import JsonEncoder
from torchotel.exporters.run_folder import (
    RUN_NAME,
    TRACE_GLOB,
    ClaimedFolder,
    LineFile,
    discard_folder,
    next_segment,
    segment_number,
)
from torchotel.tracing.span import Attributes, Trace

SEGMENT_BYTES = 8 * 1024 * 1024
MAX_LINE_SPANS = 4000
"""Spans of a line, about 2 MB; a longer trace has several lines, so that readers need less memory."""

Result = TypeVar("Result")
_logger = logging.getLogger("torchotel")


@dataclass(slots=True)
class _Segment:
    """A file of traces; only the newest one is open."""

    path: Path
    size: int = 0
    spans: int = 0


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
        self._segments = deque(map(_measure, sorted(claimed.path.glob(TRACE_GLOB), key=segment_number)))
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
        if record.gradients.sharded:
            line["gradient_scope"] = "shard"
    if record.tensor_gradients:
        line["tensor_gradient_norms"] = {gradient.name: gradient.norm for gradient in record.tensor_gradients}
    if record.memory:
        line["memory"] = [memory._asdict() for memory in record.memory]
    if nonfinite:
        line["nonfinite"] = nonfinite
    return line | _of_ranks(record)


def _of_ranks(record: StepRecord) -> dict[str, object]:
    """Return what compares a step with that of other ranks."""
    line: dict[str, object] = {}
    if record.alignment is not None:
        line["alignment"] = record.alignment
    if record.collectives:
        line["collectives"], line["waits"] = len(record.collectives), phase_waits_s(record)
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
