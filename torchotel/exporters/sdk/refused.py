"""Import the SDK where its import raises of a variable."""

import os
from contextlib import suppress

_VARIABLE = "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"
"""`opentelemetry.sdk.trace` reads it when it is imported, and raises ValueError unless it is a whole number."""


def import_despite_limit() -> None:
    """Import `opentelemetry.sdk.trace` without a limit that it cannot read, of which `Config` has warned.

    Metrics over OTLP and samplers import it too, and so does the program.
    """
    text = os.environ.get(_VARIABLE)
    if text is None or text.strip().isdecimal():
        return
    del os.environ[_VARIABLE]
    try:
        with suppress(ImportError):
            import opentelemetry.sdk.trace  # noqa: F401, PLC0415  # 0.1 s, and only in this case
    finally:
        os.environ[_VARIABLE] = text
