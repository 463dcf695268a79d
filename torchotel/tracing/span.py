"""The form of a finished span that every trace exporter takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from torchotel._records import Baggage, Error, SpanReference

AttributeValue: TypeAlias = str | bool | int | float | tuple[str, ...]
Attributes: TypeAlias = Mapping[str, AttributeValue]


@dataclass(frozen=True, slots=True, eq=False)
class SpanTemplate:
    """What many spans have in common. Compared by identity, so that an exporter can keep its encoding."""

    name: str
    attributes: Attributes


class SpanEvent(NamedTuple):
    """Something that happened at a moment of a span; `time_ns` is unix time."""

    name: str
    time_ns: int
    attributes: Attributes
    dropped: int = 0
    """Attributes that a limit left out."""


class SpanLink(NamedTuple):
    """A reference to a span of another trace."""

    trace_id: int
    span_id: int
    attributes: Attributes
    dropped: int = 0
    """Attributes that a limit left out."""
    sampled: bool = True
    remote: bool = False
    """Whether the span came from another process."""
    state: str = ""
    """Its `tracestate`."""


class Dropped(NamedTuple):
    """What limits left out of a span."""

    attributes: int
    events: int
    links: int


class Span(NamedTuple):
    """One finished span; times are unix nanoseconds, ids are integers."""

    template: SpanTemplate
    span_id: int
    parent_id: int
    """0: a root."""
    start_ns: int
    end_ns: int
    attributes: Attributes | None = None
    """What only this span has, after the template's."""
    error: Error | None = None
    events: tuple[SpanEvent, ...] = ()
    links: tuple[SpanLink, ...] = ()
    dropped: Dropped | None = None
    """Once it was held to limits: its attributes and events then spell the error out already."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Spans of one trace that leave together, parents before children."""

    trace_id: int
    spans: Sequence[Span]
    attributes: Attributes
    """What every span of it carries besides its own."""
    remote_parent: bool = False
    """Whether the parent of the first span is in another process."""
    state: str = ""
    """The `tracestate` of its spans, which the caller's has."""
    sampled: bool = True
    """The flag of its spans' contexts: False if the sampler had left out a trace that is kept late."""

    @property
    def root(self) -> Span:
        """Return the span that all others are below."""
        return self.spans[0]


@runtime_checkable
class SpanContextSource(Protocol):
    """Who gives spans their ids: one of ours that is asked for while it runs, and each root before it is built."""

    keeps_late: bool
    """Whether a trace that was not sampled may be sent all the same, since it turned out to be interesting."""
    off: bool
    """Nothing is ever sampled, not even the span of the run."""

    def start(
        self,
        name: str,
        parent: SpanReference | None,
        start_ns: int,
        attributes: Attributes | None = None,
        baggage: Baggage | None = None,
    ) -> SpanReference:
        """Fix the ids of a span that began at `start_ns` of unix time, and whether it is sampled; from any thread.

        A parent that was started here gives the spans below it its baggage.
        """
