"""Keep instrumentations of HTTP clients from tracing what we send ourselves."""

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.context import (
    _SUPPRESS_HTTP_INSTRUMENTATION_KEY,
    _SUPPRESS_INSTRUMENTATION_KEY,
    attach,
    detach,
    set_value,
)


@contextmanager
def suppressed() -> Iterator[None]:
    """Set the keys that instrumentations heed, on this thread and while the block lasts."""
    context = set_value(_SUPPRESS_INSTRUMENTATION_KEY, value=True)
    token = attach(set_value(_SUPPRESS_HTTP_INSTRUMENTATION_KEY, value=True, context=context))
    try:
        yield
    finally:
        detach(token)
