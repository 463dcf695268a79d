"""30,000 spans per second with a busy training thread: lost spans, and the longest stall of the thread."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from time import perf_counter_ns
from typing import NamedTuple

import torch

from benchmarks import workloads
from benchmarks.naive import sdk_provider
from benchmarks.parts import Conditions, Part, Table
from benchmarks.records import record
from benchmarks.sink import Sink
from benchmarks.spread import spread
from benchmarks.stalls import longest_gap_ns
from torchotel._records import Record, StepRecord
from torchotel._utils.faults import Guard, Warn
from torchotel._utils.gil import GilYielder
from torchotel.config.otlp_endpoint import OtlpEndpoint
from torchotel.exporters.otlp.http import HttpTransport
from torchotel.exporters.otlp.trace_exporter import RequestExporter
from torchotel.metrics.store import Metrics
from torchotel.tracing.ids import IdGenerator
from torchotel.tracing.span_templates import Templates
from torchotel.tracing.trace_builder import TraceBuilder
from torchotel.worker.buffer import Buffer
from torchotel.worker.pipeline import Pipeline
from torchotel.worker.thread import Worker

SPANS_PER_S = 30_000
LEAST_NS = 500_000
FLUSH_S = 60.0
OURS, THEIRS = "torchotel", "the SDK's default processor"
LARGE, MODULES = "torchotel, steps of 2,000 modules", 2_000
NO_SPANS, BUSY = "no spans", "no spans, another busy program"
OFFERED, LOST, STALL = "spans/s offered", "lost", "longest stall, ms"


class Offer(NamedTuple):
    """A source of spans in small batches, with functions to flush and to count them."""

    give: Callable[[], int]
    """Makes some spans and returns their approximate number."""
    drain: Callable[[], object]
    made: Callable[[], int]
    """Returns the number of all spans after a drain."""


def part(workload: str) -> Part:
    """Offer spans to torchotel's worker and to the SDK's batch processor at one pace."""
    return Part(
        "load",
        "30,000 spans a second",
        "The thread runs small operators without a pause, like a training with short kernels. It hands torchotel"
        " records of the transformer's steps, or of a chain of 2,000 modules. It hands the SDK spans with three"
        " attributes each. The stall is the longest wait between two operators in a second; the table has the median"
        " over the seconds. The rows without spans show the stalls that the machine causes. The SDK is offered fewer"
        " spans, because its spans are created on the thread itself.",
        lambda conditions: _measure(workload, conditions),
    )


def _measure(workload: str, conditions: Conditions) -> Table:
    rows: Table = {}
    for name, opened in {
        NO_SPANS: _no_spans(),
        BUSY: _busy(),
        OURS: _handed_over(workload, conditions.sink),
        LARGE: _handed_over(str(MODULES // 20 if conditions.quick else MODULES), conditions.sink),
        THEIRS: _started(conditions.sink),
    }.items():
        with opened as offer:
            _run(offer, 0.1)  # a warm-up: imports and connections
            offer.drain()
            conditions.sink.count()
            before = offer.made()
            seconds = [_run(offer, 0.1 if conditions.quick else 1.0) for _ in range(conditions.rounds(10))]
            offer.drain()
            made, (arrived, _) = offer.made() - before, conditions.sink.count()
        rows[name] = {
            OFFERED: made / sum(one.lasted_s for one in seconds),
            LOST: 1 - arrived / made if made else 0.0,
            STALL: spread([one.longest_ns / 1e6 for one in seconds]),
        }
    return rows


class _Second(NamedTuple):
    lasted_s: float
    longest_ns: int


def _run(offer: Offer, seconds: float) -> _Second:
    """Offer spans at the rate, and run operators until the next spans are due."""
    longest_ns, small = 0, torch.zeros(8)
    begin_ns = due_ns = perf_counter_ns()
    while due_ns < begin_ns + seconds * 1e9:
        due_ns += int((offer.give() or 300) / SPANS_PER_S * 1e9)
        until_ns = max(due_ns, perf_counter_ns() + LEAST_NS)  # operators also run if the rate cannot be kept
        longest_ns = max(longest_ns, longest_gap_ns(small, until_ns))
    return _Second((perf_counter_ns() - begin_ns) / 1e9, longest_ns)


@contextmanager
def _no_spans() -> Iterator[Offer]:
    yield Offer(lambda: 0, lambda: None, lambda: 0)


@contextmanager
def _busy() -> Iterator[Offer]:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])  # a constant program
    with _no_spans() as offer:
        yield offer
    busy.kill()
    busy.wait()


@contextmanager
def _handed_over(workload: str, sink: Sink) -> Iterator[Offer]:
    units = cycle(record(workloads.make(workload), 8))
    gc.freeze()  # a real training does not keep its records
    transport = HttpTransport(OtlpEndpoint(sink.traces), version="0")
    exporter = RequestExporter(transport, resource={}, version="0")
    buffer = Buffer()
    worker = _worker(buffer, exporter)

    def give() -> int:
        unit = next(units)
        buffer.append(unit)
        return unit.span_estimate()

    worker.start()
    yield Offer(give, lambda: worker.flush(FLUSH_S), lambda: worker.spans_recorded)
    worker.stop(FLUSH_S)
    exporter.shutdown(time.monotonic() + FLUSH_S)


class _Deaf:
    """A listener that does nothing."""

    def before_first(self, record: Record) -> None:
        """Do nothing."""

    def step_processed(self, step: StepRecord, worker_ns: int) -> None:
        """Do nothing."""


def _worker(buffer: Buffer, exporter: RequestExporter) -> Worker:
    sliced, guard, warn = GilYielder(), Guard("the worker"), Warn()
    pipeline = Pipeline(
        TraceBuilder(Templates(), None, sliced),
        [exporter],
        IdGenerator("always_on"),
        Metrics(dict, dict),
        sliced,
        listener=_Deaf(),
        run_file=None,
        guard=guard,
        warn=warn,
    )
    return Worker(buffer, [exporter], pipeline, on_record=None, guard=guard, warn=warn)


@contextmanager
def _started(sink: Sink) -> Iterator[Offer]:
    provider = sdk_provider(sink.traces)
    tracer, made = provider.get_tracer("load"), 0

    def give() -> int:
        nonlocal made
        made += 300
        for number in range(300):
            attributes = {"torch.module.path": f"{number}", "torch.module.type": "Linear", "torch.direction": "forward"}
            tracer.start_span(f"forward {number}", attributes=attributes).end()
        return 300

    yield Offer(give, provider.force_flush, lambda: made)
    provider.shutdown()
