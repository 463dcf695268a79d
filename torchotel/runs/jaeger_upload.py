"""Split a run into files for Jaeger's upload page: whole lines of OTLP/JSON, limited in traces and bytes."""

import json
from collections.abc import Iterator
from typing import NamedTuple

from torchotel._limits import MAX_UPLOAD_BYTES, MAX_UPLOAD_TRACES
from torchotel.runs.reader import RequestLine, Run, RunError


class Line(NamedTuple):
    """A line with its line break, and the number of its file, from 1."""

    file: int
    text: bytes


def lines(run: Run) -> Iterator[Line]:
    """Yield the lines of a run's traces in their order.

    Raises:
        RunError: A line is not valid OTLP/JSON; Jaeger's page would refuse the whole file.
    """
    traces: frozenset[str] = frozenset()
    file = size = 0
    for request in run.requests():
        text = _text(run, request)
        if not file or len(traces | request.trace_ids) > MAX_UPLOAD_TRACES or size + len(text) > MAX_UPLOAD_BYTES:
            traces, size = frozenset(), 0
            file += 1
        traces |= request.trace_ids
        size += len(text)
        yield Line(file, text)


def _text(run: Run, line: RequestLine) -> bytes:
    try:
        text = json.dumps(line.request, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        # Python's json module reads NaN and Infinity, which JSON does not allow.
        raise RunError(f"{run.folder}: holds a line that torchotel does not write ({error})") from error
    return text.encode("utf-8", "replace") + b"\n"
