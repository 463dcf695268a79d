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
from torchotel.tracing.ids import OTHER_FLAGS, span_context_of

Resolve = Callable[[], SpanReference | None]
"""Returns the ids of the innermost open span of a step; None if there is none."""

(SPAN,) = trace.set_span_in_context(INVALID_SPAN, Context())
"""The key of the current span in a context. Each step reads it twice, and the API's function makes ten calls."""
(_BAGGAGE,) = baggage.set_baggage("name", "value", Context())


def current_baggage() -> Baggage | None:
    """Return the baggage of the calling thread's context, None if it is empty; OpenTelemetry never changes it."""
    return cast("Baggage | None", get_current().get(_BAGGAGE)) or None


def baggage_context(found: Baggage | None) -> Context:
    """Return a context that has only this baggage."""
    return Context({_BAGGAGE: found}) if found else Context()


def current_span() -> SpanReference | None:
    """Return the user's span that is current on the calling thread, below the proxies of this thread's steps.

    In a block of `suppress_instrumentation()`, return `SUPPRESSED`.
    """
    context = get_current()
    if _is_suppressed(context):
        return SUPPRESSED
    span = _span_of(context)
    while type(span) is ContextProxySpan and span.thread == threading.get_ident():
        span = span.outer
    return None if span is INVALID_SPAN else reference_of(span.get_span_context())


def _is_suppressed(context: Context) -> bool:
    """Return whether a key of `opentelemetry.instrumentation.utils.suppress_instrumentation` is set."""
    return bool(context.get(_SUPPRESS_INSTRUMENTATION_KEY) or context.get("suppress_instrumentation"))


def _span_of(context: Context) -> Span:
    span = context.get(SPAN, INVALID_SPAN)
    return span if type(span) is ContextProxySpan or span is INVALID_SPAN else trace.get_current_span(context)


def reference_of(context: SpanContext) -> SpanReference | None:
    """Return the ids of a span context; None if it is invalid."""
    if not context.is_valid:
        return None
    state = context.trace_state.to_header() if context.trace_state else ""
    flags = context.trace_flags
    others = flags & OTHER_FLAGS
    return SpanReference(context.trace_id, context.span_id, flags.sampled, context.is_remote, state, others)


class ContextProxySpan(NonRecordingSpan):
    """The current span while a step runs; its ids are those of the innermost open span at the time of each read.

    Args:
        resolve: Returns the ids of the innermost open span; None if there is none.
        key: The step or the call that it was attached for.
        outer: The user's span that was current before.
    """

    def __init__(self, resolve: Resolve, key: object, outer: Span) -> None:
        super().__init__(trace.INVALID_SPAN_CONTEXT)
        self.key, self.thread = key, threading.get_ident()
        self._resolve, self._outer = resolve, outer
        self._outer_recorded = outer is not INVALID_SPAN and outer.is_recording()

    @property
    def outer(self) -> Span:
        """The user's span that was current before; an invalid span if it has ended since."""
        ended = self._outer_recorded and not self._outer.is_recording()
        return INVALID_SPAN if ended else self._outer

    def get_span_context(self) -> SpanContext:
        """Return the ids of the innermost open span, which are fixed by that."""
        reference = self._resolve()
        if reference is None:
            return self.outer.get_span_context()
        return span_context_of(reference)

    def detach(self) -> None:
        """Restore the previous span, if this one is still current."""
        if trace.get_current_span() is self:
            attach(trace.set_span_in_context(self.outer))

    # Programs change the current span, which they expect to be theirs.

    def is_recording(self) -> bool:
        """Return whether the user's span records."""
        return self.outer.is_recording()

    def set_attribute(self, key: str, value: Any) -> None:
        """Set an attribute on the user's span."""
        self.outer.set_attribute(key, value)

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Set attributes on the user's span."""
        self.outer.set_attributes(attributes)

    def add_event(self, name: str, attributes: Any = None, timestamp: int | None = None) -> None:
        """Add an event to the user's span."""
        self.outer.add_event(name, attributes, timestamp)

    def record_exception(self, exception: BaseException, *args: Any, **kwargs: Any) -> None:
        """Record an exception on the user's span."""
        self.outer.record_exception(exception, *args, **kwargs)

    def set_status(self, status: Any, description: str | None = None) -> None:
        """Set the status of the user's span."""
        self.outer.set_status(status, description)

    def update_name(self, name: str) -> None:
        """Rename the user's span."""
        self.outer.update_name(name)

    def add_link(self, context: SpanContext, attributes: Any = None) -> None:
        """Add a link to the user's span."""
        self.outer.add_link(context, attributes)

    def end(self, end_time: int | None = None) -> None:
        """End the user's span."""
        self.outer.end(end_time)

    def __getattr__(self, name: str) -> Any:
        """Read a public attribute of the user's span, such as the SDK's `name` and `parent`, even if it has ended."""
        if name.startswith("_"):  # copy() reads special methods before `_outer` is set
            raise AttributeError(name)
        value = getattr(self._outer, name)
        return self.get_span_context() if name == "context" else value


def attach_proxy(resolve: Resolve, key: object) -> Callable[[], None] | None:
    """Attach a proxy span to the context of the calling thread; return the function that detaches it.

    Return None if a proxy for the same key is current, or if the program has suppressed instrumentation.

    Args:
        resolve: Returns the ids of the innermost open span.
        key: The step or the call that the proxy is for; it replaces a proxy with another key.
    """
    context = get_current()
    if _is_suppressed(context):
        return None
    outer = _span_of(context)
    if type(outer) is ContextProxySpan and outer.thread == threading.get_ident():
        if outer.key is key:
            return None
        outer = outer.outer
    proxy = ContextProxySpan(resolve, key, outer)
    attach(Context({**context, SPAN: proxy}))
    return proxy.detach


@contextmanager
def suppressed() -> Iterator[None]:
    """Suppress the instrumentations of this thread's HTTP and gRPC clients during the block."""
    context = set_value(_SUPPRESS_INSTRUMENTATION_KEY, value=True)
    token = attach(set_value(_SUPPRESS_HTTP_INSTRUMENTATION_KEY, value=True, context=context))
    try:
        yield
    finally:
        detach(token)
