"""Metrics from records: what counts as what, and what is left out."""

import logging
import math
import re
from dataclasses import replace
from typing import Any

import pytest
from support.call_signatures import call_signature

from torchotel._limits import MAX_METRIC_MODULES
from torchotel._records import (
    CallSignature,
    DeviceMemory,
    GradientNorms,
    Log,
    ModuleCall,
    ModuleInfo,
    SpanReference,
    StepRecord,
    TensorGradient,
)
from torchotel._utils.gil import GilYielder
from torchotel.metrics import instruments as table
from torchotel.metrics.aggregation import MAX_PENDING
from torchotel.metrics.instruments import Instrument
from torchotel.metrics.store import Metrics, Observation
from torchotel.tracing.call_tree import CallTree, CallTreeBuilder

MS = 1_000_000
CONVENTIONS = """
torch.step.duration torch_step_duration_seconds histogram s
torch.phase.time torch_phase_time_seconds_total counter s torch.phase
torch.module.time torch_module_time_seconds_total counter s MODULE
torch.module.calls torch_module_calls_total counter {call} MODULE
torch.module.duration torch_module_duration_seconds histogram s MODULE
torch.module.device_time torch_module_device_time_seconds_total counter s MODULE
torch.module.gradient.norm torch_module_gradient_norm gauge - torch.model torch.module.path torch.gradient.scope
torch.gradient.norm torch_gradient_norm gauge - torch.gradient.scope
torch.tensor.gradient.norm torch_tensor_gradient_norm gauge - torch.tensor.name
torch.step.nonfinite torch_step_nonfinite_total counter {step} torch.nonfinite.kind
torch.steps torch_steps_total counter {step}
torch.samples torch_samples_total counter {sample}
torch.evaluations torch_evaluations_total counter {evaluation}
torch.loss torch_loss gauge -
torch.learning_rate torch_learning_rate gauge -
torch.step.last_end.time torch_step_last_end_time_seconds gauge s
torch.run.finished torch_run_finished gauge -
torch.run.stalled torch_run_stalled gauge -
torch.tokens torch_tokens_total counter {token}
torch.log torch_log gauge - torch.log.name
torch.evaluation.time torch_evaluation_time_seconds_total counter s
torch.memory.allocated torch_memory_allocated_bytes gauge By torch.device
torch.memory.reserved torch_memory_reserved_bytes gauge By torch.device
torch.memory.peak torch_memory_peak_bytes gauge By torch.device
torch.collective.time torch_collective_time_seconds_total counter s torch.collective.operation torch.collective.group
torch.collective.wait torch_collective_wait_seconds_total counter s torch.collective.operation torch.collective.group
torch.collective.bytes torch_collective_bytes_total counter By torch.collective.operation torch.collective.group
torch.collective.calls torch_collective_calls_total counter {call} torch.collective.operation torch.collective.group
torch.collective.enqueued torch_collective_enqueued gauge - torch.collective.group
torch.collective.completed torch_collective_completed gauge - torch.collective.group
torchotel.spans torchotel_spans_total counter {span} torchotel.outcome
torchotel.export.errors torchotel_export_errors_total counter {error} error.type
torchotel.overhead.ratio torchotel_overhead_ratio gauge 1
torchotel.detail.ratio torchotel_detail_ratio gauge 1
"""
"""Every row: both names, kind, unit, labels; MODULE stands for those of module calls."""


def row(instrument: Instrument) -> str:
    name = instrument.prometheus_name + ("_total" if instrument.kind == "counter" else "")
    return " ".join([instrument.name, name, instrument.kind, instrument.unit or "-", *instrument.labels])


def test_the_table_has_the_rows_of_the_conventions() -> None:
    module = "torch.model torch.module.path torch.module.type torch.direction"
    expected = CONVENTIONS.replace("MODULE", module).strip().splitlines()
    assert [row(instrument) for instrument in table.TABLE] == expected
    for instrument in table.TABLE:
        assert re.fullmatch(r"[A-Z1].*\.", instrument.description)
        assert list(instrument.bounds) == sorted(set(instrument.bounds))
        assert bool(instrument.bounds) == (instrument.kind == "histogram")


def test_names_follow_the_rules_of_opentelemetry() -> None:
    """Attributes have a namespace, and no metric is the namespace of another (specification, "Naming")."""
    metrics = {instrument.name for instrument in table.TABLE}
    assert all("." in attribute for instrument in table.TABLE for attribute in instrument.labels)
    assert [(one, other) for one in metrics for other in metrics if other.startswith(f"{one}.")] == []


def metrics(**settings: Any) -> Metrics:
    return Metrics(lambda: {"exported": 3}, lambda: {"503": 2}, **settings)


def unit(number: int = 0, length_ns: int = 5 * MS, kind: str = "step", **fields: Any) -> StepRecord:
    return StepRecord(kind, number, 0, length_ns, 10**18, 1, fields.pop("detailed", False), **fields)


def values(found: Metrics, instrument: Instrument) -> dict[tuple[str, ...], float]:
    return dict(found.points(instrument))


def call(of: CallSignature, start_ns: int = 0, end_ns: int = MS, starts: Any = (), ends: Any = ()) -> ModuleCall:
    return ModuleCall(of, start_ns, end_ns, starts, ends, None)


def test_counters_start_at_zero() -> None:
    """All phases and all outcomes are there before the first step; gauges of nothing are not."""
    begun = metrics()
    for instrument in table.TABLE:
        plain = instrument.kind == "counter" and not instrument.labels
        expected: dict[tuple[str, ...], float] = {(): 0.0} if plain else {}
        if instrument is table.PHASE_TIME:
            expected = {(phase,): 0.0 for phase in ("between", "data", "forward", "backward", "optimizer", "other")}
        if instrument is table.STEP_NONFINITE:
            expected = {("loss",): 0, ("gradient",): 0}
        if instrument is table.SPANS:
            expected = {("exported",): 3, ("dropped_queue",): 0, ("dropped_export",): 0, ("sampled_out",): 0}
        if instrument is table.EXPORT_ERRORS:
            expected = {("503",): 2}
        if instrument is table.RUN_FINISHED:
            expected = {(): 0}
        assert values(begun, instrument) == expected, instrument.name
    (duration,) = begun.histograms(table.STEP_DURATION)
    assert (sum(duration.counts), duration.sum) == (0, 0)
    assert not begun.histograms(table.MODULE_DURATION)


def test_an_evaluation_stands_for_those_that_it_folded() -> None:
    found = metrics()
    found.add(unit(kind="evaluation"), CallTree(), None)
    found.add(unit(kind="evaluation", length_ns=900 * MS, folded=40, folded_ns=80 * MS), CallTree(), None)
    assert values(found, table.EVALUATIONS) == {(): 41}
    assert values(found, table.EVALUATION_TIME) == {(): pytest.approx(0.085)}
    assert values(found, table.STEPS) == {(): 0}


def test_device_times_are_of_what_was_timed_on_a_device() -> None:
    """Two calls add up, none at all is no series, and a time of 0 is one."""
    calls = [call(call_signature(path)) for path in ("conv", "conv", "view", "host")]
    step = unit(detailed=True, calls=calls)
    timed = replace(CallTreeBuilder(GilYielder()).build(step), device_ns={0: 3 * MS, 1: 4 * MS, 2: 0})
    found = metrics()
    found.add(step, timed, None)
    assert values(found, table.MODULE_DEVICE_TIME) == {
        ("Net", "conv", "Linear", "forward"): pytest.approx(0.007),
        ("Net", "view", "Linear", "forward"): 0,
    }
    assert values(found, table.MODULE_CALLS)["Net", "host", "Linear", "forward"] == 1


def test_calls_are_counted_forward_and_backward() -> None:
    """Include and exclude are for spans; what is inside a compiled region shows nothing of itself."""
    inner, outer = call_signature("inner"), call_signature("outer")
    step = unit(detailed=True, calls=[call(inner, 10, MS, 1, 1), call(outer, 0, 2 * MS, 2, 2)])
    step.timestamps = [(2, 3 * MS, 0), (1, 3 * MS + 500, 0), (1, 4 * MS, 0), (2, 4 * MS + 500, 0)]
    found = metrics(module_histograms=True)
    found.add(step, CallTreeBuilder(GilYielder()).build(step), None)
    keys = {("Net", path, "Linear", way) for path in ("inner", "outer") for way in ("forward", "backward")}
    assert values(found, table.MODULE_CALLS) == dict.fromkeys(keys, 1)
    times = values(found, table.MODULE_TIME)
    assert times["Net", "outer", "Linear", "forward"] == pytest.approx(0.002)
    assert {one.labels: one.sum for one in found.histograms(table.MODULE_DURATION)} == times
    assert values(found, table.DETAIL_RATIO) == {(): 1}


def test_calls_of_all_steps_are_added_up() -> None:
    """By labels: a model that is built again goes on where the one before it ended, whoever has read meanwhile."""
    found = metrics()
    for number in range(6):
        calls = (
            [call(call_signature("again")), call(call_signature("again"))]
            if number % 2
            else [call(call_signature("again"))]
        )
        found.add(unit(number), CallTree(calls, 0, [-1] * 2, [False] * 2, [None] * 2, []), None)
        if number == 3:
            assert values(found, table.MODULE_CALLS) == {("Net", "again", "Linear", "forward"): 6}
    assert values(found, table.MODULE_TIME) == {("Net", "again", "Linear", "forward"): pytest.approx(0.009)}
    assert values(found, table.MODULE_CALLS) == {("Net", "again", "Linear", "forward"): 9}


def test_hidden_calls_are_left_out() -> None:
    """A compiled region is one call."""
    found = metrics()
    calls = [call(call_signature("inside")), call(call_signature("region"))]
    found.add(unit(), CallTree(calls, 0, [1, -1], [True, False], [None, None], []), None)
    assert list(values(found, table.MODULE_CALLS)) == [("Net", "region", "Linear", "forward")]


def test_what_is_logged_late_counts_too() -> None:
    """Counters grow, gauges follow; text, a step's epoch and what would turn a counter back are no metric."""
    found = metrics()
    found.add(unit(values={"loss": 2.0, "samples": 8, "epoch": 3, "acc": True}), CallTree(), None)
    found.log(Log(0, 0, {"loss": 1.0, "samples": -8, "tokens": math.inf, "note": "text", "big": 10**400}))
    assert values(found, table.LOSS) == {(): 1.0}
    assert values(found, table.SAMPLES) == {(): 8}
    assert values(found, table.TOKENS) == {(): 0}
    assert values(found, table.LOG) == {("acc",): 1.0}


def test_a_loss_that_is_no_number_is_counted_and_not_shown() -> None:
    """Once for each step, however often it was logged."""
    found = metrics()
    found.add(unit(7, values={"loss": math.nan}), CallTree(), None)
    found.log(Log(7, 0, {"loss": math.inf}))
    assert values(found, table.LOSS) == {}
    assert values(found, table.STEP_NONFINITE)["loss",] == 1
    found.add(unit(8, values={"loss": 0.5}), CallTree(), None)
    assert values(found, table.LOSS) == {(): 0.5}
    assert values(found, table.STEP_NONFINITE)["loss",] == 1


def test_gradients_and_memory_are_as_they_were_last() -> None:
    good, bad = (ModuleInfo("Net", path, "Linear", 4, 1) for path in ("good", "bad"))
    found = metrics()
    found.add(unit(gradients=GradientNorms(5.0, ((good, 3.0), (bad, 4.0)))), CallTree(), None)
    assert values(found, table.MODULE_GRADIENT_NORM) == {("Net", "good", "all"): 3.0, ("Net", "bad", "all"): 4.0}
    assert values(found, table.STEP_NONFINITE)["gradient",] == 0
    found.add(
        unit(
            gradients=GradientNorms(math.nan, ((good, 1.0), (bad, math.nan))),
            tensor_gradients=[TensorGradient(0, "probs", "2", 5.0), TensorGradient(0, "late", "2", None)],
            memory=(DeviceMemory("cuda:0", 1, 2, 3),),
        ),
        CallTree(),
        None,
    )
    assert values(found, table.GRADIENT_NORM) == {}
    assert values(found, table.MODULE_GRADIENT_NORM) == {("Net", "good", "all"): 1.0}
    assert values(found, table.STEP_NONFINITE)["gradient",] == 1
    assert values(found, table.TENSOR_GRADIENT_NORM) == {("probs",): 5.0}
    memory = (table.MEMORY_ALLOCATED, table.MEMORY_RESERVED, table.MEMORY_PEAK)
    assert [values(found, one) for one in memory] == [{("cuda:0",): number} for number in (1, 2, 3)]


def test_norms_of_a_shard_say_so() -> None:
    """Their squares are added over ranks; those of all parameters are not."""
    found = metrics()
    module = ModuleInfo("Net", "head", "Linear", 4, 1)
    found.add(unit(gradients=GradientNorms(3.0, ((module, 3.0),), sharded=True)), CallTree(), None)
    assert values(found, table.GRADIENT_NORM) == {("shard",): 3.0}
    assert values(found, table.MODULE_GRADIENT_NORM) == {("Net", "head", "shard"): 3.0}


def test_series_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """Modules that come and go don't fill the memory."""
    found = metrics(module_histograms=True)
    for number in range(MAX_METRIC_MODULES + 50):
        calls = [call(call_signature(f"made.{number}")), call(call_signature(f"more.{number}"))]
        found.add(unit(number), CallTree(calls, 0, [-1, -1], [False, False], [None, None], []), None)
    assert len(values(found, table.MODULE_CALLS)) == 2 * MAX_METRIC_MODULES
    assert len(found.histograms(table.MODULE_DURATION)) == 2 * MAX_METRIC_MODULES
    assert "left out" in caplog.text
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


def test_labels_are_what_every_format_can_carry() -> None:
    found = metrics()
    found.log(Log(0, 0, {"\ud800" + "x" * 1000: 1.0}))
    ((name,),) = values(found, table.LOG)
    assert name == "?" + "x" * 255


def test_an_exemplar_waits_for_its_trace() -> None:
    """It is shown when the trace has arrived, in the bucket of its step; a bound keeps the dropped ones few."""
    found = metrics()
    for number, length_ns in enumerate((3 * MS, 4 * MS, 40 * MS)):
        found.add(unit(number, length_ns), CallTree(), SpanReference(100 + number, number + 1, sampled=True))
    found.add(unit(3, MS // 2), CallTree(), None)
    found.exported([101, 102, 999])
    (duration,) = found.histograms(table.STEP_DURATION)
    shown = {bucket: (one.trace_id, one.span_id, one.value) for bucket, one in duration.exemplars.items()}
    assert shown == {2: (101, 2, 0.004), 5: (102, 3, 0.04)}
    assert duration.counts[:6] == (1, 0, 2, 0, 0, 1)
    for number in range(MAX_PENDING):
        found.add(unit(number, 3 * MS), CallTree(), SpanReference(5000 + number, 1, sampled=True))
    found.exported([100])
    (duration,) = found.histograms(table.STEP_DURATION)
    assert duration.exemplars[2].trace_id == 101


def test_observers_get_what_histograms_count() -> None:
    """With the root of the step, and while the metrics can be read by other threads."""
    found, seen = metrics(), list[Observation]()
    found.observe_with(seen.append)
    root = SpanReference(1, 2, sampled=True)
    found.add(unit(), CallTree(), root)
    assert seen == [Observation(table.STEP_DURATION, 0.005, (), root)]


def test_the_last_end_never_goes_back() -> None:
    """Steps of several threads come in any order."""
    found = metrics()
    found.add(unit(0, 9 * MS), CallTree(), None)
    found.add(unit(1, 5 * MS), CallTree(), None)
    assert values(found, table.STEP_LAST_END_TIME) == {(): pytest.approx(10**9 + 0.009)}
