"""Print traces to standard output.

A trace has one line per span: the SDK's console exporter prints forty lines of JSON per span, 12,000 for a step of a
ResNet-50. OTLP and the run file have all attributes.
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
"""Attributes with the inputs and outputs of a call; a backward's gradients have the opposite direction."""
_CLEAR_LINE = "\r\x1b[K"
"""Clears the unfinished line of a progress bar, which draws it again."""


class ConsoleExporter(TraceExporter):
    """Print each trace as a tree with times, in one write.

    Args:
        stats: Counts spans and failures.
    """

    def __init__(self, stats: ExportStats) -> None:
        self._stats = stats
        self._warn = Warn()

    def export(self, trace: Trace) -> None:
        """Print a trace; failures are counted, and the first one is logged."""
        out = sys.stdout  # read each time: programs redirect it
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
    words = [span.template.name, *_type(span.template), *_shapes(span.template.attributes)]
    words += (f"{key}={_value(value)}" for key, value in drop_nonfinite(span.attributes or {}).items())
    if depth == 0:
        words += (f"{key}={_value(value)}" for key, value in drop_nonfinite(trace.attributes).items())
        words.append(f"trace_id={trace.trace_id:032x}")
    words += (event.name for event in span.events)
    if span.error is not None:
        words.append(f"ERROR {span.error.type}: {span.error.message}")
    time = duration((span.end_ns - span.start_ns) / 1e9)
    return f"{time:>9}  {'  ' * depth}{printable('  '.join(words))}"


def _type(template: SpanTemplate) -> Iterator[str]:
    """Yield the class of a module unless it is the module's name."""
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
