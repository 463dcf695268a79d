"""Read a run folder: step records, spans, logged values and the run's own description (`run.json`)."""

import contextlib
import fcntl
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

from torchotel import _semconv as names
from torchotel._collectives import READING_KIND, CollectiveReading, decode_reading
from torchotel._limits import MAX_INFO_BYTES, MAX_LINE_BYTES

UNSENT_NAME = "unsent.jsonl"
"""The file of steps without a record, which a companion process writes and locks."""
_MAX_INT = 2**63
_TYPES: Mapping[str, type | Mapping[str, type]] = {
    "torchotel.version": str,
    "run_id": str,
    "launch": str,
    "service_name": str,
    "started_unix_nano": str,
    "finished": bool,
    "config": dict,
    "resource": dict,
    "error": {"type": str, "message": str},
    "model": {"name": str, "modules": int, "parameters": int},
    "recording": {"segments_deleted": int, "spans_deleted": int, "steps_dropped": int},
}


class RunError(Exception):
    """A folder or file cannot be read as a run; the message says which, and why."""


def read_info(path: Path) -> Mapping[str, Any]:
    """Return the content of `run.json`, without values of another type than torchotel writes.

    Returns an empty mapping if the file is missing or is not complete JSON, as after a crash.

    Raises:
        RunError: The file cannot be read, or is larger than `MAX_INFO_BYTES`.
    """
    if not path.is_file():  # opening a named pipe would block for ever
        return {}
    try:
        with path.open("rb") as file:
            text = file.read(MAX_INFO_BYTES + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror})") from error
    if len(text) > MAX_INFO_BYTES:
        raise RunError(f"{path}: has more than {MAX_INFO_BYTES:,} bytes")
    try:
        info = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return _select_valid(info, _TYPES) if isinstance(info, dict) else {}


def _select_valid(values: Mapping[str, Any], types: Mapping[str, type | Mapping[str, type]]) -> dict[str, Any]:
    valid = {}
    for name, value in values.items():
        kind = types.get(name)
        if isinstance(kind, Mapping):
            if isinstance(value, dict):
                valid[name] = _select_valid(value, kind)
        elif kind is None or (type(value) is kind and not (isinstance(value, int) and abs(value) > _MAX_INT)):
            valid[name] = value
    return valid


Value: TypeAlias = str | bool | int | float | tuple[Any, ...] | None


_logger = logging.getLogger("torchotel")
_STATUS_ERROR = 2
_MAX_INT64 = 2**63 - 1
_MAX_S = _MAX_INT64 / 1e9
"""The longest time that fits into 64 bits of nanoseconds, some 300 years."""
_UNEXPECTED = (TypeError, ValueError, AttributeError, KeyError, OverflowError, RecursionError)
"""Exceptions that a line raises if it is JSON but not what torchotel writes."""

Line = TypeVar("Line")


class RecordLine(NamedTuple):
    """One line of `metrics.jsonl`: a step, an evaluation, or values that were logged after their step had ended."""

    kind: str
    """step | evaluation | data | log; data is a fetch that no step followed."""
    number: int
    start_unix_ns: int
    duration_s: float
    phases: Mapping[str, float]
    """Seconds of self time by phase: between, data, forward, backward, optimizer, other."""
    detailed: bool
    trace_id: str
    error_type: str | None
    error_message: str | None
    error_path: str = ""
    """Path of the module that raised; empty: unknown."""
    grad: bool = False
    """Evaluations: whether the evaluation ran with gradients, as a training step's forward does."""
    training: bool = True
    """Evaluations: whether the model was in training mode; always true in runs of earlier versions."""
    values: Mapping[str, Value] = {}
    """Logged values by name; None for a number that was not finite."""
    gradient_norm: float | None = None
    gradient_norms: Mapping[str, Mapping[str, float | None]] = {}
    """L2 norms by model and module path; None for a norm that was not finite."""
    nonfinite: Sequence[str] = ()
    """Names of the values that were NaN or infinite."""
    error_phase: str = ""
    """Phase that raised the error; empty: unknown."""
    folded: int = 0
    """Evaluations that this line stands for; 0: the line is a single evaluation."""
    folded_s: float = 0.0
    """Seconds of all evaluations that this line stands for."""
    alignment: tuple[int, int] | None = None
    """Names the step on all ranks; None if there are no other ranks."""
    collectives: int = 0
    """Collectives of process groups in the step."""
    waits: Mapping[str, float] = {}
    """Seconds of these collectives by the phase that they began in; of several that ran at once, the first counts."""


class LayerKey(NamedTuple):
    """A module in one direction."""

    model: str
    path: str
    direction: str


class SpanLine(NamedTuple):
    """One span of the trace files; ids are hexadecimal, times unix nanoseconds."""

    trace_id: str
    span_id: str
    parent_id: str
    """Empty: the span is a root."""
    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value]
    error: bool

    @property
    def duration_ns(self) -> int:
        """Return the duration, at least 0."""
        return max(0, self.end_ns - self.start_ns)

    @property
    def layer(self) -> LayerKey | None:
        """Return the module and direction of a module call; None: the span is no module call."""
        path = self.attributes.get(names.MODULE_PATH)
        if path is None or names.MODULE_TYPE not in self.attributes:  # a failed root has the path of what raised
            return None
        model, direction = self.attributes.get(names.MODEL, ""), self.attributes.get(names.DIRECTION, "forward")
        return LayerKey(str(model), str(path), str(direction))


class Call(NamedTuple):
    """A module call of a trace."""

    span: SpanLine
    layer: LayerKey
    outer: LayerKey | None
    """The module call around it; the self time of `outer` is less by the duration of this call."""


def calls_by_trace(spans: Iterable[SpanLine]) -> Iterator[tuple[str, Sequence[Call]]]:
    """Yield the module calls of each trace, with the trace id; the lines of a trace follow each other."""
    for trace_id, trace in groupby(spans, key=attrgetter("trace_id")):
        layers = [(span, layer) for span in trace if (layer := span.layer) is not None]
        by_id = {span.span_id: layer for span, layer in layers}
        yield trace_id, [Call(span, layer, by_id.get(span.parent_id)) for span, layer in layers]


class RequestLine(NamedTuple):
    """One line of the trace files: an `ExportTraceServiceRequest` in OTLP/JSON."""

    request: Mapping[str, Any]
    trace_ids: frozenset[str]
    spans: int
    start_ns: int
    """Start of the first span that the line contains."""


@dataclass(frozen=True)
class Run:
    """A run folder. Each method reads the files again, so that a run can be read while it is being recorded."""

    folder: Path
    info: Mapping[str, Any]
    """Content of `run.json`: configuration, resource, model; empty if the file is missing or not complete."""
    on_read: Callable[[int], object] = int
    """Called with the bytes of each line that is read, for a progress display."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the step records and of all spans."""
        size = 0
        for path in (self.folder / "metrics.jsonl", *_segments(self.folder)):
            with contextlib.suppress(FileNotFoundError):
                size += path.stat().st_size
        return size

    def records(self) -> Iterator[RecordLine]:
        """Read the steps and evaluations in the order in which they ended.

        If the training and its companion process have ended together, the steps that had no record follow.
        """
        yield from self._recorded(self.on_read)
        yield from self._unsent(lambda line: (_record(line),))

    def _recorded(self, on_read: Callable[[int], object]) -> Iterator[RecordLine]:
        yield from self._lines(on_read, lambda line: () if line.get("kind") == READING_KIND else (_record(line),))

    def _lines(
        self, on_read: Callable[[int], object], convert: Callable[[dict[str, Any]], Iterable[Line]]
    ) -> Iterator[Line]:
        path = self.folder / "metrics.jsonl"
        if path.is_file():
            yield from _converted(path, _objects(path, on_read), convert)

    def readings(self) -> Iterator[CollectiveReading]:
        """Read the readings of PyTorch's flight recorder, the oldest first."""
        return self._lines(
            self.on_read, lambda line: (decode_reading(line),) if line.get("kind") == READING_KIND else ()
        )

    def _unsent(self, convert: Callable[[dict[str, Any]], Iterable[Line]]) -> Iterator[Line]:
        """Read the lines of the steps that had no record when the training and its companion ended together."""
        if not self._left_unsent():
            return
        last: dict[str, int] = {}
        for record in self._recorded(int):
            last[record.kind] = max(record.number, last.get(record.kind, -1))

        def convert_new(line: dict[str, Any]) -> Iterable[Line]:
            record = _record(line)
            return convert(line) if record.number > last.get(record.kind, -1) else ()

        path = self.folder / UNSENT_NAME
        with contextlib.suppress(FileNotFoundError):  # the next run may have added the steps meanwhile
            yield from _converted(path, _objects(path, self.on_read), convert_new)

    def _left_unsent(self) -> bool:
        """Return whether there is a file of steps without a record, and no process that holds its lock."""
        path = self.folder / UNSENT_NAME
        if not path.is_file():  # opening a named pipe would block for ever
            return False
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def spans(self) -> Iterator[SpanLine]:
        """Read all spans, oldest segment first."""
        return self._traces(_spans)

    def requests(self) -> Iterator[RequestLine]:
        """Read the lines of the trace files as they are, oldest segment first."""
        return self._traces(lambda request: (_request(request),))

    def _traces(self, convert: Callable[[dict[str, Any]], Iterable[Line]]) -> Iterator[Line]:
        for path in _segments(self.folder):
            # A run that is being recorded deletes its oldest segment at the size limit.
            with contextlib.suppress(FileNotFoundError):
                yield from _converted(path, _objects(path, self.on_read), convert)
        yield from self._unsent(lambda line: convert(line["trace"]) if "trace" in line else ())


def holds_run(folder: Path) -> bool:
    """Return whether a folder has any file of a run; a folder of another user that cannot be read has none."""
    try:
        return any((folder / name).exists() for name in ("run.json", "metrics.jsonl")) or bool(_segments(folder))
    except PermissionError:
        return False


def open_run(folder: Path) -> Run:
    """Open a run folder.

    Raises:
        RunError: The folder does not exist, or holds no run.
    """
    if not folder.is_dir():
        reason = "is a file" if folder.exists() else "no such folder"
        raise RunError(f"{folder}: {reason}; name a run folder")
    path = folder / "run.json"
    if not holds_run(folder):
        missing = "run.json, metrics.jsonl and trace-*.jsonl are missing or cannot be read"
        raise RunError(f"{folder}: no run in it ({missing}); name a run folder")
    info = read_info(path)
    if not info:
        _logger.warning("%s is missing or holds no JSON object. Settings and model of the run are not shown.", path)
    if not (folder / "metrics.jsonl").is_file():
        _logger.warning("%s has no file metrics.jsonl. Steps and evaluations are not shown.", folder)
    return Run(folder, info)


def _segments(folder: Path) -> list[Path]:
    # By length first: segment numbers have five digits, or more after 99,999 segments.
    paths = (path for path in folder.glob("trace-*.jsonl") if path.is_file())  # a named pipe would block for ever
    return sorted(paths, key=lambda path: (len(path.name), path.name))


def _converted(
    path: Path, objects: Iterable[dict[str, Any]], convert: Callable[[dict[str, Any]], Iterable[Line]]
) -> Iterator[Line]:
    for value in objects:
        try:
            yield from convert(value)
        except _UNEXPECTED as error:
            raise RunError(f"{path}: holds a line that torchotel does not write ({error})") from error


def _objects(path: Path, on_read: Callable[[int], object]) -> Iterator[dict[str, Any]]:
    """Yield a JSON object a line. A crash cuts only the last line, so a bad line before it raises RunError."""
    bad = 0
    for number, line in enumerate(_lines(path), 1):
        on_read(len(line))
        if not line.strip():
            continue
        if bad:
            raise RunError(f"{path}: line {bad} is no JSON object")
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            yield value
        else:
            bad = number


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as lines:
            while line := lines.readline(MAX_LINE_BYTES + 1):
                if len(line) <= MAX_LINE_BYTES:
                    yield line
                    continue
                while line and not line.endswith(b"\n"):
                    line = lines.readline(MAX_LINE_BYTES)
                _logger.warning("%s: skipped a line of more than %s bytes", path, f"{MAX_LINE_BYTES:,}")
                yield b"\n"  # so that error messages count lines as the file does
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror})") from error


def _record(line: Mapping[str, Any]) -> RecordLine:
    error = line.get("error") or {}
    return RecordLine(
        kind=str(line.get("kind", "step")),
        number=_integer(line.get("number", 0)),
        start_unix_ns=_integer(line.get("time_unix_nano", 0)),
        duration_s=_seconds(line.get("duration_s")),
        phases={name: _seconds(seconds) for name, seconds in (line.get("phases") or {}).items()},
        detailed=bool(line.get("detailed", False)),
        trace_id=str(line.get("trace_id") or ""),
        error_type=str(error.get("type")) if error else None,
        error_message=str(error.get("message")) if error else None,
        error_path=str(error.get("path") or ""),
        grad=bool(line.get("grad", False)),
        training=bool(line.get("training", True)),
        values={name: _logged(value) for name, value in (line.get("values") or {}).items()},
        gradient_norm=_number(line.get("gradient_norm")),
        gradient_norms={
            model: {path: _number(norm) for path, norm in norms.items()}
            for model, norms in (line.get("gradient_norms") or {}).items()
        },
        nonfinite=tuple(map(str, line.get("nonfinite") or ())),
        error_phase=str(error.get("phase") or ""),
        folded=_integer(line.get("folded", 0)),
        folded_s=_seconds(line.get("folded_s")),
        alignment=_alignment(line.get("alignment")),
        collectives=_integer(line.get("collectives", 0)),
        waits={name: _seconds(seconds) for name, seconds in (line.get("waits") or {}).items()},
    )


def _alignment(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    collectives, steps = value
    return _integer(collectives), _integer(steps)


def _seconds(value: Any) -> float:
    return min(max(0.0, _number(value) or 0.0), _MAX_S)


def _integer(value: Any) -> int:
    """Read an integer, which OTLP/JSON writes as a string, and clamp it to 64 bits."""
    return max(-_MAX_INT64, min(int(value), _MAX_INT64))


def _number(value: Any) -> float | None:
    """Return a finite number unchanged, and None for any other value."""
    return value if isinstance(value, int | float) and abs(value) <= sys.float_info.max else None


def _logged(value: Any) -> Value:
    return value if isinstance(value, str) else _number(value)


def _request(request: Mapping[str, Any]) -> RequestLine:
    ids, starts_ns = [], []
    for span in _span_objects(request):
        ids.append(str(span.get("traceId", "")))
        starts_ns.append(_integer(span.get("startTimeUnixNano", 0)))
    return RequestLine(request, frozenset(ids), len(ids), min(starts_ns, default=0))


def _span_objects(request: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for resource in request.get("resourceSpans", ()):
        for scope in resource.get("scopeSpans", ()):
            yield from scope.get("spans", ())


def _spans(request: Mapping[str, Any]) -> Iterator[SpanLine]:
    for span in _span_objects(request):
        yield SpanLine(
            trace_id=str(span.get("traceId", "")),
            span_id=str(span.get("spanId", "")),
            parent_id=str(span.get("parentSpanId", "")),
            name=str(span.get("name", "")),
            start_ns=_integer(span.get("startTimeUnixNano", 0)),
            end_ns=_integer(span.get("endTimeUnixNano", 0)),
            attributes=_attributes(span.get("attributes", ())),
            error=span.get("status", {}).get("code") in (_STATUS_ERROR, "STATUS_CODE_ERROR"),
        )


def _attributes(pairs: Any) -> dict[str, Value]:
    return {str(pair["key"]): _value(pair.get("value", {})) for pair in pairs}


def _value(value: Mapping[str, Any]) -> Value:
    for kind, content in value.items():
        if kind == "intValue":
            return _integer(content)
        if kind == "doubleValue":
            return _number(float(content))
        if kind == "arrayValue":
            return tuple(_value(item) for item in content.get("values", ()))
        if isinstance(content, str | bool):
            return content
    return None
