"""The instruments that are compared, each to be put in and taken out again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import torchotel
from benchmarks.models import Workload
from benchmarks.naive import NaiveInstrument
from benchmarks.sink import Sink
from torchotel._config import Config
from torchotel._exporting import REST_S
from torchotel._session import Session
from torchotel.capture.capture import Capture
from torchotel.capture.detail import Detail
from torchotel.exporters.otlp.exporter import RequestExporter
from torchotel.exporters.otlp.transport import Reply

FLUSH_S = 60.0


@dataclass(frozen=True)
class Running:
    """An instrument that is in."""

    drain: Callable[[], object] = lambda: None
    """Finish what goes on beside the training; its time counts."""
    made: Callable[[], int] = lambda: 0
    """Spans that were meant for the sink."""


@dataclass(frozen=True)
class Mode:
    """A row of the table."""

    name: str
    enter: Callable[[], AbstractContextManager[Running]]
    sends: bool = False


def modes(workload: Workload, sink: Sink) -> list[Mode]:
    """Return what is compared with no instrument at all."""
    return [
        Mode("empty global hooks", _empty_hooks),
        Mode('torchotel, hooks out (detail="off")', lambda: _whole(sink, "off"), sends=True),
        Mode("torchotel, capture alone", _capture),
        Mode("torchotel, capture + build + encode", _encode),
        Mode("torchotel, the whole with export", lambda: _whole(sink, "all"), sends=True),
        Mode("naive instrumentation on the SDK", lambda: _naive(workload, sink), sends=True),
    ]


@contextmanager
def no_instrument() -> Iterator[Running]:
    """Train and do nothing else."""
    yield Running()


@contextmanager
def _empty_hooks() -> Iterator[Running]:
    def before(module: Any, args: Any) -> None:
        pass

    def after(module: Any, args: Any, *rest: Any) -> None:
        pass

    handles = [
        register_module_forward_pre_hook(before),
        register_module_forward_hook(after, with_kwargs=True, always_call=True),
    ]
    yield Running()
    for handle in handles:
        handle.remove()


@contextmanager
def _capture() -> Iterator[Running]:
    capture = Capture(lambda _: None, Detail("all"))
    capture.install()
    yield Running()
    capture.uninstall()
    capture.end()


class _Nowhere:
    """A transport that takes all and keeps nothing."""

    endpoint = "nowhere"

    def prepare(self) -> None:
        pass

    def pack(self, body: bytes) -> bytes:
        return body

    def send(self, body: bytes, timeout_s: float | None) -> Reply:
        return Reply()

    def close(self) -> None:
        pass


@contextmanager
def _encode() -> Iterator[Running]:
    exporter = RequestExporter(
        _Nowhere(), resource={"service.name": "bench"}, version="0", rest=lambda: time.sleep(REST_S)
    )
    session = Session(Config(detail="all"), None, lambda _: [exporter])
    yield Running(lambda: session.flush(10))
    session.stop(10)


@contextmanager
def _whole(sink: Sink, detail: Any) -> Iterator[Running]:
    handle = torchotel.instrument(endpoint=sink.endpoint, detail=detail, traces_exporter="otlp", record=None)
    yield Running(lambda: handle.flush(FLUSH_S), lambda: handle.stats()["spans_recorded"])
    handle.shutdown()


@contextmanager
def _naive(workload: Workload, sink: Sink) -> Iterator[Running]:
    instrument = NaiveInstrument(workload, f"{sink.endpoint}/v1/traces")
    yield Running(instrument.flush, lambda: instrument.spans)
    instrument.remove()
