"""Which tracer provider there is, and the one that we set where there is none."""

import logging
import os
from contextlib import suppress
from importlib import import_module

from opentelemetry.trace import (
    NoOpTracerProvider,
    ProxyTracerProvider,
    TracerProvider,
    get_tracer_provider,
    set_tracer_provider,
)

from torchotel._utils.faults import warn_once
from torchotel.config.config import Config
from torchotel.exporters.base import ExportStats, TraceExporter
from torchotel.exporters.sdk.provider_flush import ProviderFlush
from torchotel.tracing.span import Attributes

_logger = logging.getLogger("torchotel")
_ours: TracerProvider | None = None
"""Set globally by us, and that can be done only once in a process."""


_LIMIT_VARIABLE = "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"
"""`opentelemetry.sdk.trace` reads it when it is imported, and raises ValueError unless it is a whole number."""


def import_despite_limit() -> None:
    """Import `opentelemetry.sdk.trace` without a limit that it cannot read, of which `Config` has warned.

    Metrics over OTLP and samplers import it too, and so does the program.
    """
    text = os.environ.get(_LIMIT_VARIABLE)
    if text is None or text.strip().isdecimal():
        return
    del os.environ[_LIMIT_VARIABLE]
    try:
        with suppress(ImportError):
            import_module("opentelemetry.sdk.trace")
    finally:
        os.environ[_LIMIT_VARIABLE] = text


def find_provider(given: TracerProvider | None) -> TracerProvider | None:
    """Return the provider that spans are replayed through: the given one, else the global one if it isn't ours."""
    if given is not None:
        return given
    current = _global_provider()
    none = isinstance(current, ProxyTracerProvider | NoOpTracerProvider) or current is _ours
    return None if none else current


def _global_provider() -> TracerProvider | None:
    """Return the global provider, or None if OTEL_PYTHON_TRACER_PROVIDER names one that cannot be loaded.

    The API loads it at the first call (opentelemetry.util._providers) and raises what its entry point raises.
    """
    try:
        return get_tracer_provider()
    except Exception as error:  # noqa: BLE001  # an entry point of any package may raise anything
        warn_once(
            "No tracer provider could be loaded (%s: %s). Spans are exported without it. "
            "Check OTEL_PYTHON_TRACER_PROVIDER.",
            type(error).__name__,
            str(error),
        )
        return None


def set_provider(config: Config, resource: Attributes) -> None:
    """Set a global provider that sends the user's own spans where ours go; where one is set, warn and leave it.

    The SDK reads OTEL_TRACES_SAMPLER and OTEL_BSP_* by itself.
    """
    global _ours  # noqa: PLW0603  # the global provider can be set once in a process
    current = _global_provider()
    if current is not None and current is _ours:
        return
    if current is not None and not isinstance(current, ProxyTracerProvider):
        _logger.warning(
            "A tracer provider is set globally already, a %s: set_global_provider=True changes nothing. "
            "Leave it out, and spans are replayed through that one.",
            type(current).__qualname__,
        )
        return
    try:
        from torchotel.exporters.sdk.user_provider import make_provider  # noqa: PLC0415  # loads the SDK's exporters

        _ours = make_provider(config, resource)
    except Exception as error:  # noqa: BLE001  # a malformed OTEL_* variable, or OTEL_PYTHON_METER_PROVIDER's entry point
        _logger.warning(
            "The SDK made no tracer provider (%s): set_global_provider=True changes nothing, and the program's own "
            "spans are not exported. Correct the OTEL_* variable.",
            str(error) or f"{type(error).__name__}; OTEL_PYTHON_METER_PROVIDER may name a provider that is not there",
        )
        return
    set_tracer_provider(_ours)


def user_spans(stats: ExportStats) -> list[TraceExporter]:
    """Return who flushes the provider that we set, where we did."""
    return [] if _ours is None else [UserSpans(_ours, stats)]


class UserSpans(TraceExporter):
    """Flush the user's own spans with ours; it takes no traces, and the provider lives on for the next run."""

    def __init__(self, provider: TracerProvider, stats: ExportStats) -> None:
        self._flush = ProviderFlush(provider, stats)

    def flush(self, deadline_s: float) -> bool:
        """Send the spans that the user's program ended."""
        return self._flush.by(deadline_s)

    def shutdown(self, deadline_s: float) -> None:
        """Send them a last time."""
        self._flush.by(deadline_s)
