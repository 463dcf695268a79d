"""Complete exports, from records to the response of a receiver in another process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from opentelemetry.sdk.trace import TracerProvider

from benchmarks.naive import sdk_provider
from benchmarks.records import Builder
from torchotel._records import StepRecord
from torchotel.config.otlp_endpoint import OtlpEndpoint
from torchotel.exporters.base import TraceExporter
from torchotel.exporters.otlp.http import HttpTransport
from torchotel.exporters.otlp.trace_exporter import RequestExporter
from torchotel.exporters.sdk.tracer_provider import TracerProviderExporter

FLUSH_S = 60.0

SENT = "built, encoded, compressed and sent"


@contextmanager
def complete_exports(units: Sequence[StepRecord], endpoint: str) -> Iterator[dict[str, Callable[[], None]]]:
    """Yield a function for each exporter that exports all records and waits until they have arrived.

    The exporters do not yield the GIL meanwhile. Replaying alone uses a provider without processors; the rest is the
    SDK's queue, encoder and request.
    """
    ours = RequestExporter(
        HttpTransport(OtlpEndpoint(endpoint), version="0"), resource={"service.name": "bench"}, version="0"
    )
    provider, silent = sdk_provider(endpoint), TracerProvider(shutdown_on_exit=False)
    exporters = {
        SENT: ours,
        "built, replayed through the SDK's tracer": TracerProviderExporter(silent, version="0"),
        "built, replayed, and sent by the SDK": TracerProviderExporter(provider, version="0"),
    }
    builder = Builder()
    yield {name: partial(_send, exporter, builder, units) for name, exporter in exporters.items()}
    ours.shutdown(time.monotonic() + FLUSH_S)
    provider.shutdown()


def _send(exporter: TraceExporter, builder: Builder, units: Sequence[StepRecord]) -> None:
    for unit in units:
        exporter.export(builder.build(unit))
    exporter.push()
    assert exporter.flush(time.monotonic() + FLUSH_S)
