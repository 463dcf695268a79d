"""Traces on standard output, for a first look without a server.

A trace is a few lines, one for each span, written at once: the SDK's console exporter spends forty lines of JSON on
a span, 12,000 on a step of a ResNet-50. All attributes are in OTLP and in the run file.
"""

import sys
from collections.abc import Iterator

from torchotel import _semconv as names
from torchotel._utils.faults import Warn
from torchotel._utils.text import duration, printable
from torchotel.exporters.base import ExportStats, TraceExporter
from torchotel.exporters.sanitize import drop_nonfinite
from torchotel.tracing.span import Attributes, AttributeValue, Span, SpanTemplate, Trace

_ARROWS = (
    (names.INPUT_SHAPES, names.OUTPUT_SHAPES),
    (names.GRAD_OUTPUT_SHAPES, names.GRAD_INPUT_SHAPES),
)
"""What goes into a call and what comes out of it: a backward's gradients go the other way."""
_CLEAR_LINE = "\r\x1b[K"
"""For a terminal: a progress bar has left its line unfinished, and draws it anew."""


class ConsoleExporter(TraceExporter):
    """Print each trace as a tree with times, in one write.

    Args:
        stats: Where spans and failures are counted.
    """

    def __init__(self, stats: ExportStats) -> None:
        self._stats = stats
        self._warn = Warn()

    def export(self, trace: Trace) -> None:
        """Print one trace; where that fails it is counted, and told once."""
        out = sys.stdout  # looked up each time: programs redirect it
        try:
            start = _CLEAR_LINE if out.isatty() else ""
            text = start + "\n".join(_lines(trace)) + "\n"
            out.write(text.encode(out.encoding or "utf-8", "replace").decode(out.encoding or "utf-8"))
            out.flush()
        except Exception as error:  # noqa: BLE001  # a stream of the program may raise anything
            self._stats.error(type(error).__name__)
            self._stats.dropped(len(trace.spans))
            self._warn("Could not print a trace; further failures are only counted", error=error)
        else:
            self._stats.exported(len(trace.spans), [trace.trace_id])


def _lines(trace: Trace) -> Iterator[str]:
    depths: dict[int, int] = {}
    children: dict[int, list[Span]] = {}
    known = {span.span_id for span in trace.spans}
    for span in trace.spans:
        children.setdefault(span.parent_id if span.parent_id in known else 0, []).append(span)
    waiting = list(reversed(children.get(0, [])))
    while waiting:
        span = waiting.pop()
        depth = depths.get(span.parent_id, -1) + 1
        depths[span.span_id] = depth
        waiting += sorted(children.get(span.span_id, []), key=lambda child: -child.start_ns)
        yield _line(trace, span, depth)


def _line(trace: Trace, span: Span, depth: int) -> str:
    said = [span.template.name, *_type(span.template), *_shapes(span.template.attributes)]
    said += (f"{key}={_value(value)}" for key, value in drop_nonfinite(span.attributes or {}).items())
    if depth == 0:
        said += (f"{key}={_value(value)}" for key, value in drop_nonfinite(trace.attributes).items())
        said.append(f"trace_id={trace.trace_id:032x}")
    said += (event.name for event in span.events)
    if span.error is not None:
        said.append(f"ERROR {span.error.type}: {span.error.message}")
    time = duration((span.end_ns - span.start_ns) / 1e9)
    return f"{time:>9}  {'  ' * depth}{printable('  '.join(said))}"


def _type(template: SpanTemplate) -> Iterator[str]:
    """Say the class of a module, where it is not its name as well."""
    kind = str(template.attributes.get(names.MODULE_TYPE, ""))
    if kind and not template.name.endswith(f" {kind}"):
        yield kind


def _shapes(attributes: Attributes) -> Iterator[str]:
    for before, after in _ARROWS:
        if before in attributes or after in attributes:
            yield " → ".join(_value(attributes.get(name, ())) or "none" for name in (before, after))


def _value(value: AttributeValue) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return ",".join(value) if isinstance(value, tuple) else str(value)
