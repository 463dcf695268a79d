"""Read a run folder: steps, spans, logged values and what is known of the run."""

import contextlib
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

from torchotel import _semconv as names

MAX_INFO_BYTES = 4 * 1024 * 1024
"""Settings, a resource and a few numbers take some kilobytes."""

MAX_NAMED_RANKS = 2
"""Folders in the message on a missing one."""
_MOST = 2**63
_FORM: Mapping[str, type | Mapping[str, type]] = {
    "torchotel.version": str,
    "run_id": str,
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
    """Say which folder or file cannot be read as a run, and why."""


def read_info(path: Path) -> Mapping[str, Any]:
    """Read what a run says of itself; empty where the run ended before that was whole.

    Raises:
        RunError: The file cannot be read, or is too large to be looked at.
    """
    if not path.is_file():  # a pipe would let us wait for ever
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
    return _formed(info, _FORM) if isinstance(info, dict) else {}


def _formed(values: Mapping[str, Any], form: Mapping[str, type | Mapping[str, type]]) -> dict[str, Any]:
    formed = {}
    for name, value in values.items():
        kind = form.get(name)
        if isinstance(kind, Mapping):
            if isinstance(value, dict):
                formed[name] = _formed(value, kind)
        elif kind is None or (type(value) is kind and not (isinstance(value, int) and abs(value) > _MOST)):
            formed[name] = value
    return formed


Value: TypeAlias = str | bool | int | float | tuple[Any, ...] | None

MAX_LINE_BYTES = 64 * 1024 * 1024
"""A longer line, some 100,000 spans, is skipped with a warning: to parse it would take gigabytes."""

_logger = logging.getLogger("torchotel")
_STATUS_ERROR = 2
_LARGEST = 2**63 - 1
_MAX_S = _LARGEST / 1e9
"""What can be said in nanoseconds, some 300 years."""
_FOREIGN = (TypeError, ValueError, AttributeError, KeyError, OverflowError, RecursionError)
"""What a line raises that is JSON and yet not what torchotel writes."""

Line = TypeVar("Line")


class RecordLine(NamedTuple):
    """One line of `metrics.jsonl`: a step, an evaluation, or what was logged when its step was gone."""

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
    """Of an evaluation: whether it ran with gradients, as a training step's forward does."""
    training: bool = True
    """Of an evaluation: whether its model was in training mode; unknown in older runs."""
    values: Mapping[str, Value] = {}
    """What was logged; a number that was not finite is None."""
    gradient_norm: float | None = None
    gradient_norms: Mapping[str, Mapping[str, float | None]] = {}
    """By model and path."""
    nonfinite: Sequence[str] = ()
    """What was NaN or infinite."""
    error_phase: str = ""
    """Phase that raised the error; empty: unknown."""
    folded: int = 0
    """How many evaluations it stands for; 0: for itself."""
    folded_s: float = 0.0
    """Their time."""


class SpanLine(NamedTuple):
    """One span of the trace files; ids are hexadecimal, times unix nanoseconds."""

    trace_id: str
    span_id: str
    parent_id: str
    """Empty: a root."""
    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value]
    error: bool


class RequestLine(NamedTuple):
    """One line of the trace files: an `ExportTraceServiceRequest` as OTLP/JSON has it."""

    request: Mapping[str, Any]
    trace_ids: frozenset[str]
    spans: int


@dataclass(frozen=True)
class Run:
    """A run folder. Its files are read anew by each call, so a run that still goes on can be looked at."""

    folder: Path
    info: Mapping[str, Any]
    """`run.json`: configuration, resource, model; empty where the run ended before it was whole."""
    on_read: Callable[[int], object] = int
    """Called with the bytes of each line as it is read, for those who show how far they are."""

    @property
    def size_bytes(self) -> int:
        """How much there is to read: the steps and all spans."""
        size = 0
        for path in (self.folder / "metrics.jsonl", *_segments(self.folder)):
            with contextlib.suppress(FileNotFoundError):
                size += path.stat().st_size
        return size

    def units(self) -> Iterator[RecordLine]:
        """Read the steps and evaluations in the order in which they ended."""
        path = self.folder / "metrics.jsonl"
        if path.is_file():
            yield from _converted(path, _objects(path, self.on_read), lambda line: (_unit(line),))

    def spans(self) -> Iterator[SpanLine]:
        """Read all spans, oldest segment first."""
        return self._traces(_spans)

    def requests(self) -> Iterator[RequestLine]:
        """Read the lines of the trace files as they are, oldest segment first."""
        return self._traces(lambda request: (_request(request),))

    def _traces(self, convert: Callable[[dict[str, Any]], Iterable[Line]]) -> Iterator[Line]:
        for path in _segments(self.folder):
            # A run that still goes on deletes its oldest segment where it would grow too large.
            with contextlib.suppress(FileNotFoundError):
                yield from _converted(path, _objects(path, self.on_read), convert)


def open_run(folder: Path) -> Run:
    """Open a run folder.

    Raises:
        RunError: there is no such folder, or it holds no run.
    """
    if not folder.is_dir():
        what = "is a file, not a run folder" if folder.exists() else f"no such folder{_ranks_of(folder)}"
        raise RunError(f"{folder}: {what}")
    path = folder / "run.json"
    if not path.exists() and not (folder / "metrics.jsonl").exists() and not _segments(folder):
        raise RunError(f"{folder}: no run in it (run.json, metrics.jsonl and trace-*.jsonl are missing)")
    return Run(folder, read_info(path))


def _ranks_of(folder: Path) -> str:
    """Name the folders of a run's ranks, which have the rank's number behind the folder's name."""
    ranks = sorted(
        (path for path in folder.parent.glob("*-rank*") if path.name.rpartition("-rank")[0] == folder.name),
        key=lambda path: (len(path.name), path.name),
    )
    more = f" and {len(ranks) - MAX_NAMED_RANKS:,} more" if len(ranks) > MAX_NAMED_RANKS else ""
    named = ", ".join(map(str, ranks[:MAX_NAMED_RANKS]))
    return f"; each rank has its own: {named}{more}" if ranks else ""


def _segments(folder: Path) -> list[Path]:
    # By length first: the number behind trace- has five digits, and more once they are used up.
    paths = (path for path in folder.glob("trace-*.jsonl") if path.is_file())  # a pipe would let us wait for ever
    return sorted(paths, key=lambda path: (len(path.name), path.name))


def _converted(
    path: Path, objects: Iterable[dict[str, Any]], convert: Callable[[dict[str, Any]], Iterable[Line]]
) -> Iterator[Line]:
    for value in objects:
        try:
            yield from convert(value)
        except _FOREIGN as error:
            raise RunError(f"{path}: holds a line that torchotel does not write ({error})") from error


def _objects(path: Path, on_read: Callable[[int], object]) -> Iterator[dict[str, Any]]:
    """Read a JSON object a line; a crash cuts only the last one, so a bad line before it is an error."""
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
                yield b"\n"  # so that error messages count lines as the file has them
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror})") from error


def _unit(line: Mapping[str, Any]) -> RecordLine:
    error = line.get("error") or {}
    return RecordLine(
        kind=str(line.get("kind", "step")),
        number=_whole(line.get("number", 0)),
        start_unix_ns=_whole(line.get("time_unix_nano", 0)),
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
        folded=_whole(line.get("folded", 0)),
        folded_s=_seconds(line.get("folded_s")),
    )


def _seconds(value: Any) -> float:
    return min(max(0.0, _number(value) or 0.0), _MAX_S)


def _whole(value: Any) -> int:
    """Read an integer, a string in OTLP/JSON where it has 64 bits, and more it may not have."""
    return max(-_LARGEST, min(int(value), _LARGEST))


def _number(value: Any) -> float | None:
    """Take a number that a float can hold as it is; anything else is none."""
    return value if isinstance(value, int | float) and abs(value) <= sys.float_info.max else None


def _logged(value: Any) -> Value:
    return value if isinstance(value, str) else _number(value)


def _request(request: Mapping[str, Any]) -> RequestLine:
    ids = [str(span.get("traceId", "")) for span in _span_objects(request)]
    return RequestLine(request, frozenset(ids), len(ids))


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
            start_ns=_whole(span.get("startTimeUnixNano", 0)),
            end_ns=_whole(span.get("endTimeUnixNano", 0)),
            attributes=_attributes(span.get("attributes", ())),
            error=span.get("status", {}).get("code") in (_STATUS_ERROR, "STATUS_CODE_ERROR"),
        )


def _attributes(pairs: Any) -> dict[str, Value]:
    return {str(pair["key"]): _value(pair.get("value", {})) for pair in pairs}


def _value(value: Mapping[str, Any]) -> Value:
    for kind, content in value.items():
        if kind == "intValue":
            return _whole(content)
        if kind == "doubleValue":
            return _number(float(content))
        if kind == "arrayValue":
            return tuple(_value(item) for item in content.get("values", ()))
        if isinstance(content, str | bool):
            return content
    return None


def open_runs(folder: Path) -> Sequence[Run]:
    """Open a run folder, or all that lie in a folder; ranks of one run are not several, so rank 0 stands for them.

    Raises:
        RunError: There is no such folder, or no run of a rank 0.
    """
    inner = () if (folder / "metrics.jsonl").exists() else sorted(folder.glob("*/metrics.jsonl"))
    runs = [open_run(path.parent) for path in inner]
    return [run for run in runs if _rank(run) == 0] or [open_run(folder)]


def _rank(run: Run) -> object:
    return run.info.get("resource", {}).get(names.RANK, 0)
