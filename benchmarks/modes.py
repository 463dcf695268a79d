"""The compared instruments, each of which can be installed and removed repeatedly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from time import clock_gettime_ns
from typing import Any

from opentelemetry.sdk.trace import TracerProvider
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import ProfilerActivity, profile

from benchmarks.interleave import NOTHING, Mode, Running
from benchmarks.naive import NaiveInstrument, sdk_provider
from benchmarks.native import native_modes
from benchmarks.nowhere import Nowhere
from benchmarks.sink import Sink
from benchmarks.wandb_watch import wandb_modes
from benchmarks.workloads import Workload
from torchotel._session import Session
from torchotel.capture.recorder import Capture
from torchotel.config.config import Config
from torchotel.exporters.otlp.trace_exporter import RequestExporter
from torchotel.sampling.detail import Detail

FLUSH_S = 60.0

AGAIN = "no instrument, repeated"
EMPTY = "empty hooks"
OFF = 'torchotel, `detail="off"`'
DEFAULT = "torchotel, default settings"
DEFAULT_THREAD = 'torchotel, `worker="thread"`'
ALL = 'torchotel, `detail="all"`'
ALL_THREAD = 'torchotel, `detail="all"`, `worker="thread"`'
SPANS = 'torchotel, `detail="all"`, no gradient norms'
FEWER = 'torchotel, `detail="all"`, `max_depth=1`'
SDK = 'torchotel, `detail="all"`, your TracerProvider'
NAIVE = "naive: live SDK spans"
PROFILER = "torch.profiler"


@contextmanager
def modes(workload: Workload, sink: Sink) -> Iterator[list[Mode]]:
    """Yield all instruments; each keeps its threads and connections between its blocks."""
    with ExitStack() as stack:

        def ours(**settings: Any) -> Callable[[], AbstractContextManager[Running]]:
            session = stack.enter_context(paused_session(sink, **settings))
            return lambda: resumed(session)

        replayed, live = (stack.enter_context(_provider(sink)) for _ in range(2))
        naive = NaiveInstrument(workload.model, live)
        watched = stack.enter_context(wandb_modes(workload.model))
        yield [
            Mode(AGAIN, NOTHING.enter),
            Mode(EMPTY, _empty_hooks),
            Mode(OFF, ours(detail="off")),
            Mode(DEFAULT, ours()),
            Mode(DEFAULT_THREAD, ours(worker="thread")),
            # With the default max_spans the deepest modules would be folded, and naive would have more spans.
            Mode(ALL, ours(detail="all", max_spans=None)),
            Mode(ALL_THREAD, ours(detail="all", max_spans=None, worker="thread")),
            Mode(SPANS, ours(detail="all", max_spans=None, gradient_norms=False)),
            Mode(FEWER, ours(detail="all", max_spans=None, max_depth=1)),
            Mode(SDK, ours(detail="all", max_spans=None, tracer_provider=replayed)),
            Mode(NAIVE, lambda: _naive(naive, live)),
            Mode("torchotel, hooks only", _hooks_alone),
            Mode("torchotel, hooks only, no gradient norms", lambda: _hooks_alone(gradient_norms=False)),
            *native_modes(),
            Mode("torchotel, a thread that does not send", _encode),
            Mode(PROFILER, _profiler),
            *watched,
        ]


@contextmanager
def paused_session(sink: Sink, **settings: Any) -> Iterator[Session]:
    """Start torchotel with its hooks removed; of several sessions, only one may be resumed."""
    session = Session(Config(**{"endpoint": sink.endpoint, "prometheus_port": 0, **settings}), None)
    session.pause()
    yield session
    session.stop(FLUSH_S)


@contextmanager
def resumed(session: Session) -> Iterator[Running]:
    """Install the hooks until the block ends."""
    before = session.stats()["spans_recorded"]
    pid = session.companion_pid
    session.resume()
    yield Running(
        lambda: session.flush(FLUSH_S),
        lambda: session.stats()["spans_recorded"] - before,
        (lambda: 0) if pid is None else lambda: clock_gettime_ns(_cpu_clock(pid)),
    )
    session.pause()


def _cpu_clock(pid: int) -> int:
    """Return the clock of a process's CPU time, as `clock_getcpuclockid` of Linux does."""
    return ~pid << 3 | 2


@contextmanager
def _provider(sink: Sink) -> Iterator[TracerProvider]:
    provider = sdk_provider(sink.traces)
    yield provider
    provider.shutdown()


@contextmanager
def _naive(instrument: NaiveInstrument, provider: TracerProvider) -> Iterator[Running]:
    before = instrument.spans
    instrument.install()
    yield Running(provider.force_flush, lambda: instrument.spans - before)
    instrument.remove()


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
def _hooks_alone(**settings: Any) -> Iterator[Running]:
    capture = Capture(lambda _: None, Detail("all"), **settings)
    capture.install()
    yield Running()
    capture.uninstall()
    capture.end()


@contextmanager
def _encode() -> Iterator[Running]:
    exporter = RequestExporter(Nowhere(), resource={"service.name": "bench"}, version="0")
    session = Session(Config(detail="all", max_spans=None, prometheus_port=0), None, lambda _: [exporter])
    yield Running()
    session.stop(FLUSH_S)


@contextmanager
def _profiler() -> Iterator[Running]:
    """Record operators with their shapes on the CPU; writing them to a file is not measured."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True):
        yield Running()
