"""30,000 spans per second with a busy training thread: lost spans, and the longest stall of the thread."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch

from benchmarks import workloads
from benchmarks.modes import FLUSH_S, paused_session, resumed
from benchmarks.naive import sdk_provider
from benchmarks.parts import Conditions, Part, Table
from benchmarks.records import record
from benchmarks.sink import Sink
from benchmarks.spread import spread
from benchmarks.stalls import longest_gap_ns

SPANS_PER_S = 30_000
LEAST_NS = 500_000
OURS, THEIRS = "torchotel", "the SDK's default processor"
LARGE, MODULES = "torchotel, steps of 2,000 modules", 2_000
THREAD = 'torchotel, `worker="thread"`'
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
    """Offer spans to torchotel and to the SDK's batch processor at one pace."""
    return Part(
        "load",
        "30,000 spans a second",
        "The thread runs small operators without a pause, like a training with short kernels. It hands torchotel"
        " records of the transformer's steps, or of a chain of 2,000 modules. It hands the SDK spans with three"
        " attributes each. The stall is the longest wait between two operators in a second, or the"
        " longest time that handing over a record takes; the table has the median"
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
        THREAD: _handed_over(workload, conditions.sink, worker="thread"),
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
        begun_ns = perf_counter_ns()
        due_ns += int((offer.give() or 300) / SPANS_PER_S * 1e9)
        given_ns = perf_counter_ns() - begun_ns
        until_ns = max(due_ns, perf_counter_ns() + LEAST_NS)  # operators also run if the rate cannot be kept
        longest_ns = max(longest_ns, given_ns, longest_gap_ns(small, until_ns))
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
def _handed_over(workload: str, sink: Sink, **settings: Any) -> Iterator[Offer]:
    training = workloads.make(workload)
    units = cycle(record(training, 8))
    gc.freeze()  # a real training does not keep its records
    with paused_session(sink, prometheus_port=None, max_spans=None, **settings) as session:
        with resumed(session):
            for _ in range(2):  # the first record starts the run
                training.step()

        def give() -> int:
            unit = next(units)
            session.hand_over(unit)
            return unit.span_estimate()

        yield Offer(give, lambda: session.flush(FLUSH_S), lambda: session.stats()["spans_recorded"])


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
