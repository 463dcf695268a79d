"""What a training does, in memory: for users' own tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from torch.nn import Module

from torchotel import _handle
from torchotel import _semconv as names
from torchotel._handle import Handle
from torchotel._records import Error, Record
from torchotel._session import Session
from torchotel.exporters.in_memory import InMemoryExporter
from torchotel.exporters.sanitize import finite, own_attributes, own_events
from torchotel.tracing.span import AttributeValue, Span, SpanEvent, SpanLink, Trace

__all__ = ["Captured", "CapturedSpan", "capture"]

FLUSH_S = 60.0


@dataclass(frozen=True, eq=False, kw_only=True)
class CapturedSpan:
    """One finished span, with those below it; times are unix nanoseconds."""

    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, AttributeValue]
    events: tuple[SpanEvent, ...]
    links: tuple[SpanLink, ...]
    error: Error | None
    """The exception that left it."""
    trace_id: int
    span_id: int
    parent: CapturedSpan | None
    """None: a root, or below a span of the program's own."""
    children: list[CapturedSpan] = field(default_factory=list, repr=False)
    """In the order of their start."""

    @property
    def duration_s(self) -> float:
        """Give how long it lasted."""
        return (self.end_ns - self.start_ns) / 1e9

    def walk(self) -> Iterator[CapturedSpan]:
        """Yield this span and all below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def find_all(self, name: str) -> list[CapturedSpan]:
        """Give all spans of this name, here and below."""
        return [span for span in self.walk() if span.name == name]

    def find(self, name: str) -> CapturedSpan:
        """Give the only span of this name, here and below.

        Raises:
            LookupError: There is none, or there are several.
        """
        found = self.find_all(name)
        if len(found) != 1:
            there = ", ".join(dict.fromkeys(span.name for span in self.walk()))
            raise LookupError(f"{len(found)} spans {name!r} below {self.name!r}, where there are {there}")
        return found[0]


class Captured:
    """What `capture()` saw; while it runs, as far as it has ended."""

    def __init__(self, memory: InMemoryExporter, handle: Handle) -> None:
        self._memory = memory
        self.handle = handle
        """What `instrument()` returns in the block."""
        self._roots: list[CapturedSpan] = []

    @property
    def records(self) -> list[Record]:
        """Give steps, evaluations and what was logged after its step, as plain records."""
        self._flush()
        return list(self._memory.records)

    @property
    def roots(self) -> list[CapturedSpan]:
        """Give the first span of each trace: steps, evaluations, the run. Each is the same object whenever asked for.

        Raises:
            TimeoutError: What has ended could not be built in time.
        """
        self._flush()
        self._roots += map(_tree, self._memory.traces[len(self._roots) :])
        return list(self._roots)

    @property
    def steps(self) -> list[CapturedSpan]:
        """Give the training steps."""
        return [root for root in self.roots if root.name == names.SPAN_STEP]

    @property
    def evaluations(self) -> list[CapturedSpan]:
        """Give what was forwarded without training."""
        return [root for root in self.roots if root.name == names.SPAN_EVALUATION]

    def _flush(self) -> None:
        if not self.handle.flush(FLUSH_S):
            raise TimeoutError(f"not all that was captured could be built within {FLUSH_S:.0f} seconds")


@contextmanager
def capture(model: Module | None = None, *, detail: str | int = "all", **settings: object) -> Iterator[Captured]:
    """Record what the block trains, and send nothing.

    The program's own `torchotel.instrument()` returns the same handle meanwhile. No port is opened, and the
    environment's variables count for nothing, so that a test does the same everywhere.

    Args:
        model: Its modules get their full names from the first call on.
        detail: Which steps have module spans; by default all, where `instrument()` chooses.
        **settings: As of `instrument()`; where spans go can't be chosen.

    Raises:
        ConfigError: A value is bad.
        RuntimeError: torchotel runs already.
    """
    if _handle.running() is not None:
        raise RuntimeError("torchotel runs already, and one process has one: call torchotel.uninstrument() first")
    memory = InMemoryExporter()
    session = partial(Session, exporters=memory.exporters, on_record=memory.records.append)
    given = {"metrics_exporter": "none", **settings, "detail": detail}
    handle = _handle.start(given, model, environ={}, session=session)
    try:
        yield Captured(memory, handle)
    finally:
        handle.shutdown()


def _tree(trace: Trace) -> CapturedSpan:
    """Link the spans of a trace, which come parents first."""
    seen: dict[int, CapturedSpan] = {}
    for span in trace.spans:
        parent = seen.get(span.parent_id)
        seen[span.span_id] = made = _captured(span, trace, parent)
        if parent is not None:
            parent.children.append(made)
    for one in seen.values():
        one.children.sort(key=lambda child: child.start_ns)
    return seen[trace.root.span_id]


def _captured(span: Span, trace: Trace, parent: CapturedSpan | None) -> CapturedSpan:
    return CapturedSpan(
        name=span.template.name,
        start_ns=span.start_ns,
        end_ns=span.end_ns,
        attributes=dict(finite({**trace.attributes, **span.template.attributes, **own_attributes(span)})),
        events=own_events(span),
        links=span.links,
        error=span.error,
        trace_id=trace.trace_id,
        span_id=span.span_id,
        parent=parent,
    )
