"""The worker's slices: what is done between two rests, during which the training thread has no GIL."""

import sys
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from torchotel._records import CallSignature, GradientNorms, ModuleCall, ModuleInfo, Phase, SpanReference, StepRecord
from torchotel._utils.gil import SLICE_ITEMS, GilYielder
from torchotel.exporters.otlp.encoder import SpanEncoder
from torchotel.exporters.sanitize import DEFAULT_LIMITS, Limiter
from torchotel.metrics.instruments import MODULE_CALLS
from torchotel.metrics.store import Metrics
from torchotel.tracing.call_tree import CallTreeBuilder
from torchotel.tracing.span_templates import Templates
from torchotel.tracing.trace_builder import TraceBuilder

ROOT = SpanReference(7, 8, sampled=True)


def chain(modules: int, backwards: int = 1) -> StepRecord:
    """Make a step of a model that calls so many modules, one after the other, and of so many backwards through it."""
    infos = [ModuleInfo("Net", str(number), "Linear", 1, 1) for number in range(modules)]
    infos.append(ModuleInfo("Net", "Net", "Net", 0, 0))
    nothing = None, None, None, None, None, None
    shared = CallSignature(infos[0], *nothing, device="cpu", training=True, grad_enabled=True, compiled=False)
    signatures = [replace(shared, module=info) for info in infos]
    calls = [
        ModuleCall(signature, 10_000 * number, 10_000 * number + 9000, 2 * number + 1, 2 * number + 2, None)
        for number, signature in enumerate(signatures)
    ]
    forward_end_ns = 10_000 * (modules + 1)
    calls[-1] = calls[-1]._replace(start_ns=0, end_ns=forward_end_ns)
    slots = [slot for call in reversed(calls) for slot in (call.starts, call.ends)]
    timestamps = [
        (slot, forward_end_ns + 5000 * (order + len(slots) * task), task)
        for task in range(backwards)
        for order, slot in enumerate(slots)
        if isinstance(slot, int)
    ]
    end_ns = timestamps[-1][1] + 1
    phases = (Phase("forward", 0, forward_end_ns), Phase("backward", forward_end_ns, end_ns))
    norms = GradientNorms(1.0, tuple((info, 1.0) for info in infos))
    unit = StepRecord("step", 0, 0, end_ns, unix_offset_ns=0, thread=1, detailed=True)
    unit.phases, unit.calls, unit.timestamps, unit.gradients = phases, calls, timestamps, norms
    return unit


def lines_between_rests(unit: StepRecord, max_spans: int | None) -> list[int]:
    """Count the lines of Python that run from one rest to the next while a record becomes bytes for a second time."""
    counts: list[int] = []

    def count(_frame: FrameType, event: str, _argument: object) -> Any:
        counts[-1] += event == "line"
        return count

    def rest() -> None:
        counts.append(0)

    sliced = GilYielder(rest)
    timer, metrics = CallTreeBuilder(sliced), Metrics(dict, dict, yielder=GilYielder(rest))
    builder = TraceBuilder(Templates(), max_spans, sliced)
    limiter, encoder = Limiter(DEFAULT_LIMITS, sliced), SpanEncoder(sliced)

    def work() -> None:
        timed = timer.build(unit)
        metrics.add(unit, timed, ROOT)
        encoder.encode(limiter.apply(builder.build(unit, timed, ROOT, {})))

    work()  # what is kept for each signature is made here
    counts[:] = [0]
    before = sys.gettrace()
    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(before)
    return counts


@pytest.mark.parametrize(
    ("max_spans", "backwards"), [(None, 1), (2000, 1), (None, 3)], ids=["whole", "folded", "accumulated"]
)
def test_slices_do_not_grow_with_the_model(max_spans: int | None, backwards: int) -> None:
    """Otherwise each step in detail of a model of thousands of modules would hold the training up for milliseconds."""
    small, large = (lines_between_rests(chain(modules, backwards), max_spans) for modules in (1000, 4000))
    assert sum(large) > 3 * sum(small)
    assert max(large) < 1.1 * max(small)


def test_loops_fill_a_slice_together() -> None:
    """So a step of many short loops rests as often as one of few long ones; and each loop gives all that there is."""
    rests: list[int] = []
    given: list[int] = []
    sliced = GilYielder(lambda: rests.append(len(given)))
    for length in (SLICE_ITEMS - 1, 0, 1, 2 * SLICE_ITEMS, 5):
        before = len(given)
        given += sliced(range(length))
        assert given[before:] == list(range(length))
    assert len(rests) == 3


def test_a_reading_within_a_reading_finds_each_call_once() -> None:
    """As a signal's handler may read while the thread that it came to reads, and rests."""
    unit = chain(1000)
    readings: list[float] = []

    def rest() -> None:
        if not readings:
            readings.append(0.0)
            metrics.points(MODULE_CALLS)

    metrics = Metrics(dict, dict, yielder=GilYielder(rest))
    metrics.add(unit, CallTreeBuilder(GilYielder()).build(unit), ROOT)
    readings.clear()  # so that it is the reading that is rested in
    assert sum(point.value for point in metrics.points(MODULE_CALLS)) == 2 * len(unit.calls)
    assert readings
