"""Size of a span on the wire."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence

from benchmarks import workloads
from benchmarks.nowhere import Kept
from benchmarks.parts import Cell, Part
from benchmarks.records import Builder, record
from torchotel._records import StepRecord
from torchotel.exporters.otlp.trace_exporter import RequestExporter

RESOURCE = {"service.name": "bench"}
LEVELS = (1, 6)
_GZIP_WBITS = 31


def level(number: int) -> str:
    """Return the name of the column of a compression level."""
    return f"gzip level {number}"


def part(*names: str) -> Part:
    """Measure the export requests of workloads."""
    return Part(
        "wire",
        "Bytes per span",
        "Requests of up to 4,000 spans, before and after compression. torchotel uses level 1.",
        lambda conditions: {
            name: _sizes(record(workloads.make(name), steps=2 if conditions.quick else 40)) for name in names
        },
    )


def gzip(body: bytes, level: int) -> bytes:
    """Compress as torchotel does."""
    compressor = zlib.compressobj(level, zlib.DEFLATED, _GZIP_WBITS)
    return compressor.compress(body) + compressor.flush()


def _sizes(units: Sequence[StepRecord]) -> dict[str, Cell]:
    kept, builder = Kept(), Builder()
    exporter = RequestExporter(kept, resource=RESOURCE, version="0")
    traces = [builder.build(unit) for unit in units]
    for trace in traces:
        exporter.export(trace)
    exporter.shutdown(time.monotonic() + 60)
    spans = sum(len(trace.spans) for trace in traces)
    packed: dict[str, Cell] = {
        level(number): sum(len(gzip(body, number)) for body in kept.bodies) / spans for number in LEVELS
    }
    return {"uncompressed": sum(map(len, kept.bodies)) / spans, **packed}
