"""Finished spans and traces, and the interfaces of trace exporters and id sources."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from torchotel._records import Baggage, Error, SpanReference

AttributeValue: TypeAlias = str | bool | int | float | tuple[str, ...]
Attributes: TypeAlias = Mapping[str, AttributeValue]


@dataclass(frozen=True, slots=True, eq=False)
class SpanTemplate:
    """The name and the attributes that many spans share. An exporter can cache its encoding by identity."""

    name: str
    attributes: Attributes


class SpanEvent(NamedTuple):
    """An event of a span; `time_ns` is unix time."""

    name: str
    time_ns: int
    attributes: Attributes
    dropped: int = 0
    """Number of attributes that were dropped by a limit."""


class SpanLink(NamedTuple):
    """A reference to a span of another trace."""

    trace_id: int
    span_id: int
    attributes: Attributes
    dropped: int = 0
    """Number of attributes that were dropped by a limit."""
    sampled: bool = True
    remote: bool = False
    """Whether the span came from another process."""
    state: str = ""
    """The `tracestate` of the linked span."""
    other_flags: int = 0
    """The trace flags of the linked span other than `sampled`."""


class Dropped(NamedTuple):
    """Numbers of attributes, events and links that limits dropped from a span."""

    attributes: int
    events: int
    links: int


class Span(NamedTuple):
    """One finished span; times are unix nanoseconds, ids are integers."""

    template: SpanTemplate
    span_id: int
    parent_id: int
    """0 for a root span."""
    start_ns: int
    end_ns: int
    attributes: Attributes | None = None
    """Attributes of this span in addition to those of the template."""
    error: Error | None = None
    events: tuple[SpanEvent, ...] = ()
    links: tuple[SpanLink, ...] = ()
    dropped: Dropped | None = None
    """Set when limits were applied; then the error is already in `attributes` and `events`."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """The spans of one record, which are exported together; parents before children."""

    trace_id: int
    spans: Sequence[Span]
    attributes: Attributes
    """Attributes that all spans have in addition to their own."""
    remote_parent: bool = False
    """Whether the parent of the first span is in another process."""
    state: str = ""
    """The `tracestate` of its spans, inherited from the user's span."""
    sampled: bool = True
    """The sampled flag of its spans; False if only the tail sampler keeps the trace."""
    other_flags: int = 0
    """The trace flags of its spans other than `sampled`."""

    @property
    def root(self) -> Span:
        """The first span; all other spans are below it."""
        return self.spans[0]


@runtime_checkable
class SpanContextSource(Protocol):
    """Allocates span contexts: eagerly for spans observed while running, and for each root before it is built."""

    keeps_late: bool
    """Whether the tail sampler may keep a trace that was not sampled."""
    off: bool
    """Whether nothing is ever sampled, not even the span of the run."""

    def start(
        self,
        name: str,
        parent: SpanReference | None,
        start_ns: int,
        attributes: Attributes | None = None,
        baggage: Baggage | None = None,
        trace_id: int | None = None,
    ) -> SpanReference:
        """Fix the ids of a span and make its sampling decision; may be called from any thread.

        A span whose parent was started here inherits the parent's baggage.

        Args:
            name: The name of the span.
            parent: The parent; None for a root.
            start_ns: The start of the span, in unix time.
            attributes: Attributes for the sampler.
            baggage: The program's baggage, for span processors.
            trace_id: The trace of a root that shares it with other ranks; None: a new one.
        """

    def end_unsampled(self, span: SpanReference, end_ns: int) -> None:
        """End a root that is not sampled, and so is in no trace; called on the worker thread.

        Args:
            span: The root.
            end_ns: The end of the span, in unix time.
        """
