"""Record a training in memory, for users' own tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from torch.nn import Module

from torchotel import _semconv as names
from torchotel._handle import Handle, start
from torchotel._lifecycle import LIFECYCLE
from torchotel._records import Error, Record
from torchotel._session import Session
from torchotel._types import ConfigError
from torchotel.config.config import SETTINGS
from torchotel.config.settings import EXPORT, SCRAPING
from torchotel.exporters.base import InMemoryExporter
from torchotel.exporters.sanitize import drop_nonfinite, own_attributes, own_events
from torchotel.tracing.span import AttributeValue, Span, SpanEvent, SpanLink, Trace

__all__ = ["Captured", "CapturedSpan", "capture"]

FLUSH_S = 60.0
_EXPORTING = frozenset(
    name for name, setting in SETTINGS.items() if setting.group in {EXPORT, SCRAPING} and name != "service_name"
) | {"record"}
"""Settings that choose where telemetry goes."""


@dataclass(frozen=True, eq=False, kw_only=True)
class CapturedSpan:
    """One finished span and its children; times are Unix nanoseconds."""

    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, AttributeValue]
    events: tuple[SpanEvent, ...]
    links: tuple[SpanLink, ...]
    error: Error | None
    """The exception with which the span ended, if any."""
    trace_id: int
    span_id: int
    parent: CapturedSpan | None
    """The parent; None for a root and for a child of one of the program's own spans."""
    children: list[CapturedSpan] = field(default_factory=list, repr=False)
    """The children, in the order of their start."""

    @property
    def duration_s(self) -> float:
        """The duration in seconds."""
        return (self.end_ns - self.start_ns) / 1e9

    def walk(self) -> Iterator[CapturedSpan]:
        """Yield this span and all below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def find_all(self, name: str) -> list[CapturedSpan]:
        """Return all spans of this name, from this span and those below it."""
        return [span for span in self.walk() if span.name == name]

    def find(self, name: str) -> CapturedSpan:
        """Return the only span of this name, from this span and those below it.

        Raises:
            LookupError: No span or several spans have this name.
        """
        matches = self.find_all(name)
        if len(matches) != 1:
            names_below = ", ".join(dict.fromkeys(span.name for span in self.walk()))
            raise LookupError(f"{len(matches)} spans {name!r} below {self.name!r}, where there are {names_below}")
        return matches[0]


class Captured:
    """The result of `capture()`: the records and spans that have ended so far."""

    def __init__(self, memory: InMemoryExporter, handle: Handle) -> None:
        self._memory = memory
        self.handle = handle
        """The handle that `instrument()` returns in the block."""
        self._roots: list[CapturedSpan] = []

    @property
    def records(self) -> list[Record]:
        """The records of steps and evaluations, and of values that were logged after their step."""
        self._flush()
        return list(self._memory.records)

    @property
    def roots(self) -> list[CapturedSpan]:
        """The root span of each trace: steps, evaluations, the run. Repeated reads return the same objects.

        Raises:
            TimeoutError: Building the spans took too long.
        """
        self._flush()
        self._roots += map(_tree, self._memory.traces[len(self._roots) :])
        return list(self._roots)

    @property
    def steps(self) -> list[CapturedSpan]:
        """The root spans of the training steps."""
        return [root for root in self.roots if names.is_step(root.name)]

    @property
    def evaluations(self) -> list[CapturedSpan]:
        """The root spans of the evaluations."""
        return [root for root in self.roots if root.name == names.SPAN_EVALUATION]

    def _flush(self) -> None:
        if not self.handle.flush(FLUSH_S):
            raise TimeoutError(f"not all that was captured could be built within {FLUSH_S:.0f} seconds")


@contextmanager
def capture(model: Module | None = None, *, detail: str | int = "all", **settings: object) -> Iterator[Captured]:
    """Record the training of the `with` block in memory, and export nothing.

    In the block, `torchotel.instrument()` returns the same handle. No port is opened, and environment variables are
    ignored, so that a test gives the same result on every machine.

    Args:
        model: Model whose modules get their full names from the first call on.
        detail: Steps that have module spans; by default all steps.
        **settings: Arguments of `instrument()`, except those that choose an exporter.

    Yields:
        The captured records and spans.

    Raises:
        ConfigError: A setting is invalid, or chooses an exporter or an endpoint.
        RuntimeError: torchotel is already running in this process.
    """
    if LIFECYCLE.session is not None:
        raise RuntimeError("torchotel runs already, and one process has one: call torchotel.uninstrument() first")
    if (name := next(iter(settings.keys() & _EXPORTING), None)) is not None:
        got = SETTINGS[name].kind.show(settings[name])
        raise ConfigError(name, got, "no value in capture(), which exports nothing: leave it out")
    memory = InMemoryExporter()
    session = partial(Session, exporters=memory.exporters, on_record=memory.records.append)
    explicit = {**settings, "metrics_exporter": "none", "detail": detail}
    handle = start(explicit, model, environ={}, session=session)
    try:
        yield Captured(memory, handle)
    finally:
        handle.shutdown()


def _tree(trace: Trace) -> CapturedSpan:
    """Link the spans of a trace, in which parents come first; return the root span."""
    by_id: dict[int, CapturedSpan] = {}
    for span in trace.spans:
        parent = by_id.get(span.parent_id)
        by_id[span.span_id] = captured = _captured(span, trace, parent)
        if parent is not None:
            parent.children.append(captured)
    for one in by_id.values():
        one.children.sort(key=lambda child: child.start_ns)
    return by_id[trace.root.span_id]


def _captured(span: Span, trace: Trace, parent: CapturedSpan | None) -> CapturedSpan:
    return CapturedSpan(
        name=span.template.name,
        start_ns=span.start_ns,
        end_ns=span.end_ns,
        attributes=dict(drop_nonfinite({**trace.attributes, **span.template.attributes, **own_attributes(span)})),
        events=own_events(span),
        links=span.links,
        error=span.error,
        trace_id=trace.trace_id,
        span_id=span.span_id,
        parent=parent,
    )
