"""What of OpenTelemetry's context is current; the session hands capture this as a plain callback."""

from opentelemetry import trace

from torchotel._records import SpanReference


def current_span() -> SpanReference | None:
    """Return the user's span that is current on the calling thread."""
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return SpanReference(context.trace_id, context.span_id, context.trace_flags.sampled, context.is_remote)
