"""Find the program's tracer provider, or set one."""

import logging
import os
from contextlib import suppress
from importlib import import_module

from opentelemetry.environment_variables import OTEL_PYTHON_TRACER_PROVIDER
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
_own_provider: TracerProvider | None = None
"""The global provider that torchotel has set, which is possible once in a process."""


_LIMIT_VARIABLE = "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"
"""`opentelemetry.sdk.trace` reads this variable on import and raises ValueError unless it is an integer."""


def import_despite_limit() -> None:
    """Import `opentelemetry.sdk.trace` without a malformed limit, of which `Config` has warned.

    Otherwise its import would fail in OTLP metrics, in samplers and in the program.
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
    """Return the provider to replay spans through: the given one, else the global one that the program has set."""
    if given is not None:
        return given
    current = _global_provider()
    none = isinstance(current, ProxyTracerProvider | NoOpTracerProvider) or current is _own_provider
    return None if none else current


def load_no_provider() -> None:
    """Prevent the API from loading the provider that OTEL_PYTHON_TRACER_PROVIDER names."""
    os.environ.pop(OTEL_PYTHON_TRACER_PROVIDER, None)


def warn_of_late_provider() -> None:
    """Warn if the program has set a global provider since `instrument()` found none."""
    provider = find_provider(None)
    if provider is not None:
        warn_once(
            "The program set a TracerProvider (%s) after torchotel had started, so torchotel's spans do not go through "
            "it. Give it to torchotel.instrument(tracer_provider=...) before the first step.",
            type(provider).__qualname__,
        )


def _global_provider() -> TracerProvider | None:
    """Return the global provider, or None if OTEL_PYTHON_TRACER_PROVIDER names one that cannot be loaded.

    The API loads it at the first call (opentelemetry.util._providers) and raises the errors of its entry point.
    """
    try:
        return get_tracer_provider()
    except Exception as error:  # noqa: BLE001  # an entry point may raise anything
        warn_once(
            "No tracer provider could be loaded (%s: %s). Spans are exported without it. "
            "Check OTEL_PYTHON_TRACER_PROVIDER.",
            type(error).__name__,
            str(error),
        )
        return None


def set_provider(config: Config, resource: Attributes) -> None:
    """Set a global provider that exports the program's spans to the same endpoint; warn if one is set already.

    The SDK reads OTEL_TRACES_SAMPLER and OTEL_BSP_* itself.
    """
    global _own_provider  # noqa: PLW0603  # the global provider can be set once in a process
    current = _global_provider()
    if current is not None and current is _own_provider:
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

        _own_provider = make_provider(config, resource)
    except Exception as error:  # noqa: BLE001  # a malformed OTEL_* variable, or OTEL_PYTHON_METER_PROVIDER's entry point
        _logger.warning(
            "The SDK created no tracer provider (%s): set_global_provider=True changes nothing, and the program's own "
            "spans are not exported. Correct the variable or the installation that the error names.",
            str(error) or f"{type(error).__name__}; OTEL_PYTHON_METER_PROVIDER may name a provider that is not there",
        )
        return
    set_tracer_provider(_own_provider)


def global_provider_exporters(stats: ExportStats) -> list[TraceExporter]:
    """Return an exporter that flushes the global provider that torchotel has set; empty if it has set none."""
    return [] if _own_provider is None else [GlobalProviderExporter(_own_provider, stats)]


class GlobalProviderExporter(TraceExporter):
    """Flush the program's spans with those of torchotel; the provider is never shut down, for the next session."""

    def __init__(self, provider: TracerProvider, stats: ExportStats) -> None:
        self._provider_flush = ProviderFlush(provider, stats)

    def flush(self, deadline_s: float) -> bool:
        """Flush the program's spans."""
        return bool(self._provider_flush.flush_by(deadline_s))

    def shutdown(self, deadline_s: float) -> None:
        """Flush the program's spans a last time."""
        self._provider_flush.flush_by(deadline_s)
