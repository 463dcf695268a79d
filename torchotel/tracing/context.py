"""The current OpenTelemetry context: the user's span, baggage and suppression."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from opentelemetry import baggage, trace
from opentelemetry.context import (
    _SUPPRESS_HTTP_INSTRUMENTATION_KEY,
    _SUPPRESS_INSTRUMENTATION_KEY,
    Context,
    attach,
    detach,
    get_current,
    set_value,
)
from opentelemetry.trace import INVALID_SPAN, NonRecordingSpan, Span, SpanContext

from torchotel._records import SUPPRESSED, Baggage, SpanReference
from torchotel.tracing.ids import span_context_of

Ask = Callable[[], SpanReference | None]

(SPAN,) = trace.set_span_in_context(INVALID_SPAN, Context())
"""Where a context has its span: each step looks there twice, and asking the API is ten calls."""
(_BAGGAGE,) = baggage.set_baggage("name", "value", Context())


def current_baggage() -> Baggage | None:
    """Return the baggage of the calling thread's context, None if it is empty; OpenTelemetry never changes it."""
    return cast("Baggage | None", get_current().get(_BAGGAGE)) or None


def baggage_context(found: Baggage | None) -> Context:
    """Return a context that has this baggage, and nothing else."""
    return Context({_BAGGAGE: found}) if found else Context()


def current_span() -> SpanReference | None:
    """Return the user's span that is current on the calling thread; a step of this thread stands for what is below.

    `SUPPRESSED` if the program is in a block of `suppress_instrumentation()`.
    """
    context = get_current()
    if _is_suppressed(context):
        return SUPPRESSED
    span = _span_of(context)
    while type(span) is ContextProxySpan and span.thread == threading.get_ident():
        span = span.outer
    return None if span is INVALID_SPAN else reference_of(span.get_span_context())


def _is_suppressed(context: Context) -> bool:
    """Tell whether either key is set that opentelemetry.instrumentation.utils.suppress_instrumentation sets."""
    return bool(context.get(_SUPPRESS_INSTRUMENTATION_KEY) or context.get("suppress_instrumentation"))


def _span_of(context: Context) -> Span:
    span = context.get(SPAN, INVALID_SPAN)
    return span if type(span) is ContextProxySpan or span is INVALID_SPAN else trace.get_current_span(context)


def reference_of(context: SpanContext) -> SpanReference | None:
    """Return the ids of a span context; None where it has none."""
    if not context.is_valid:
        return None
    state = context.trace_state.to_header() if context.trace_state else ""
    return SpanReference(context.trace_id, context.span_id, context.trace_flags.sampled, context.is_remote, state)


class ContextProxySpan(NonRecordingSpan):
    """Stands for what is innermost at the moment that it is asked: a module call, a step, or what was there before.

    Args:
        ask: Answers with the ids of what is innermost; None for nothing.
        key: What it was made for.
        outer: The span that was current before.
    """

    def __init__(self, ask: Ask, key: object, outer: Span) -> None:
        super().__init__(trace.INVALID_SPAN_CONTEXT)
        self.key, self.thread = key, threading.get_ident()
        self._ask, self._outer = ask, outer
        self._outer_recorded = outer is not INVALID_SPAN and outer.is_recording()

    @property
    def outer(self) -> Span:
        """The span that was current before; none where it has ended since."""
        ended = self._outer_recorded and not self._outer.is_recording()
        return INVALID_SPAN if ended else self._outer

    def get_span_context(self) -> SpanContext:
        """Return the ids of what is innermost, which are its own from now on."""
        reference = self._ask()
        if reference is None:
            return self.outer.get_span_context()
        return span_context_of(reference)

    def leave(self) -> None:
        """Bring back what was current before, where this is current still."""
        if trace.get_current_span() is self:
            attach(trace.set_span_in_context(self.outer))

    # What users say of "the current span" is meant for theirs: ours has its say already.

    def is_recording(self) -> bool:
        """Tell whether the user's span below records."""
        return self.outer.is_recording()

    def set_attribute(self, key: str, value: Any) -> None:
        """Set it on the user's span below."""
        self.outer.set_attribute(key, value)

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Set them on the user's span below."""
        self.outer.set_attributes(attributes)

    def add_event(self, name: str, attributes: Any = None, timestamp: int | None = None) -> None:
        """Add it to the user's span below."""
        self.outer.add_event(name, attributes, timestamp)

    def record_exception(self, exception: BaseException, *args: Any, **kwargs: Any) -> None:
        """Record it on the user's span below."""
        self.outer.record_exception(exception, *args, **kwargs)

    def set_status(self, status: Any, description: str | None = None) -> None:
        """Set it on the user's span below."""
        self.outer.set_status(status, description)


def make_current(ask: Ask, key: object) -> Callable[[], None] | None:
    """Make a live span current on the calling thread; return what ends that.

    None if it is current already, or if the program has suppressed instrumentation.

    Args:
        ask: Answers with the ids of what is innermost.
        key: What the span is made for; one that was made for something else makes room.
    """
    context = get_current()
    if _is_suppressed(context):
        return None
    outer = _span_of(context)
    if type(outer) is ContextProxySpan and outer.thread == threading.get_ident():
        if outer.key is key:
            return None
        outer = outer.outer
    live = ContextProxySpan(ask, key, outer)
    attach(Context({**context, SPAN: live}))
    return live.leave


@contextmanager
def suppressed() -> Iterator[None]:
    """Set the keys that instrumentations heed, on this thread and while the block lasts."""
    context = set_value(_SUPPRESS_INSTRUMENTATION_KEY, value=True)
    token = attach(set_value(_SUPPRESS_HTTP_INSTRUMENTATION_KEY, value=True, context=context))
    try:
        yield
    finally:
        detach(token)
