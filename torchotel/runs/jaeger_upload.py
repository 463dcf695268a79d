"""A run in pieces that Jaeger's upload page takes: whole lines of OTLP/JSON, of bounded number and size."""

import json
from collections.abc import Iterator
from typing import NamedTuple

from torchotel.runs.reader import RequestLine, Run, RunError

MAX_TRACES = 50
"""In a file. The page shows all of them at once."""
MAX_BYTES = 20 * 1024 * 1024
"""Of a file, but for a single line that is larger. The page reads it as one text."""


class Line(NamedTuple):
    """A line with its break, and the number of its file, from 1."""

    file: int
    text: bytes


def lines(run: Run) -> Iterator[Line]:
    """Give the lines of a run's traces in their order.

    Raises:
        RunError: a line is no OTLP/JSON, which the page would refuse with all the others.
    """
    traces: frozenset[str] = frozenset()
    file = size = 0
    for request in run.requests():
        text = _text(run, request)
        if not file or len(traces | request.trace_ids) > MAX_TRACES or size + len(text) > MAX_BYTES:
            traces, size = frozenset(), 0
            file += 1
        traces |= request.trace_ids
        size += len(text)
        yield Line(file, text)


def _text(run: Run, line: RequestLine) -> bytes:
    try:
        text = json.dumps(line.request, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        # Python reads NaN and Infinity, which no other reader of JSON does.
        raise RunError(f"{run.folder}: holds a line that torchotel does not write ({error})") from error
    return text.encode("utf-8", "replace") + b"\n"
