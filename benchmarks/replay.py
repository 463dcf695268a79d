"""The two ways out, whole: from traces that are built to the answer of a receiver in another process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from torchotel._receiver import Receiver
from torchotel.exporters.otlp.exporter import RequestExporter
from torchotel.exporters.otlp.http_transport import HttpTransport
from torchotel.exporters.sdk.engine import SdkEngine
from torchotel.telemetry.spans import Trace, TraceExporter

FLUSH_S = 60.0


@contextmanager
def ways_out(traces: Sequence[Trace], endpoint: str) -> Iterator[dict[str, Callable[[], None]]]:
    """Give what exports all traces and waits until they have arrived, by each engine; neither rests meanwhile.

    Replaying alone goes to a provider without processors: the rest is the SDK's own queue, encoder and request.
    """
    transport = HttpTransport(Receiver(endpoint), version="0")
    ours = RequestExporter(transport, resource={"service.name": "bench"}, version="0")
    provider, silent = TracerProvider(shutdown_on_exit=False), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    exporters = {
        "encode and send, whole": ours,
        "replay through the SDK's tracer": SdkEngine(silent, version="0"),
        "replay, and the SDK sends, whole": SdkEngine(provider, version="0"),
    }
    yield {name: partial(_send, exporter, traces) for name, exporter in exporters.items()}
    ours.shutdown(time.monotonic() + FLUSH_S)
    provider.shutdown()


def _send(exporter: TraceExporter, traces: Sequence[Trace]) -> None:
    for trace in traces:
        exporter.export(trace)
    assert exporter.flush(time.monotonic() + FLUSH_S)
