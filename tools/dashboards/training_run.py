"""Overview of a run: speed, time by phase, learning progress and the cost of detail."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from tools.dashboards.frame import GPU, framed
from tools.dashboards.panels import THIRD, WHOLE, histogram, lines, number, per_second, stacked
from tools.dashboards.queries import Query, by, by_run, gradient_norm, grown, of_process, quantile, rate, series
from tools.dashboards.shared import STEP_TIME, overhead, overhead_now, since_the_last_step, steps_in_detail

UID = "torchotel-training"
_STEPS = rate("torch_steps_total")
_BUCKETS = rate("torch_step_duration_seconds_bucket")
_DATA_WAIT = of_process(
    rate("torch_phase_time_seconds_total", 'torch_phase="data"'), rate("torch_step_duration_seconds_sum")
)
_NOT_FINITE = series("torch_step_nonfinite_total")


def logged(counter: str) -> str:
    """Return the logged amount per second over all ranks of a run; empty if the program logs none."""
    return f"{by_run('sum', rate(counter))} > 0"


def training_run() -> Dashboard:
    """Make the first dashboard."""
    return framed(
        UID,
        "Training run",
        "Overview of a run: speed, time by phase, learning progress and the cost of detail.",
        {
            "At a glance": _GLANCE,
            "Step time": _TIME,
            "Throughput": _THROUGHPUT,
            "Learning": _LEARNING,
            "Overhead": _COST,
            GPU: _GPU,
        },
    )


_GLANCE = [
    number(
        "Steps",
        "short",
        "Training steps in the range shown; a step of several ranks counts once.",
        Query(grown("max", series("torch_steps_total"))),
    ),
    number("Step time", "s", "Mean duration of a step, now.", Query(by_run("avg", STEP_TIME))),
    number(
        "Samples per second",
        per_second("samples"),
        "Samples that the program logs with torchotel.log(samples=…), over all ranks.",
        Query(logged("torch_samples_total")),
    ),
    number("Loss", "short", "Logged loss, mean of the ranks.", Query(by_run("avg", series("torch_loss")))),
    number(
        "Data wait",
        "percentunit",
        "Share of step time spent waiting for the DataLoader, for the rank that waits longest. Above 30 %, more"
        " workers, a faster store or less work per sample help more than a faster model.",
        Query(by_run("max", _DATA_WAIT)),
        orange=0.1,
        red=0.3,
    ),
    number(
        "Steps gone NaN",
        "short",
        "Checked steps in the range shown with a NaN or infinite loss, or with such a gradient if these are more, on"
        " the rank with most. Their traces are kept and name the first layers: search Jaeger for"
        " torch.kept.reason=nan.",
        Query(grown("max", _NOT_FINITE)),
        red=0.5,
    ),
    since_the_last_step(),
    overhead_now(),
]
_TIME = [
    lines(
        "Step time",
        "s",
        "Median, 95th and 99th percentile of step durations, estimated from buckets, and the exact mean. Each dot is"
        " a step with a trace in Jaeger: click it.",
        Query(quantile(0.5, _BUCKETS), "{{torch_run_id}} median"),
        Query(quantile(0.95, _BUCKETS), "{{torch_run_id}} p95", exemplars=True),
        Query(quantile(0.99, _BUCKETS), "{{torch_run_id}} p99"),
        Query(by_run("avg", STEP_TIME), "{{torch_run_id}} mean"),
        sparse=True,
    ),
    histogram(
        "Steps by their duration",
        "s",
        "Distribution of step durations in steps per second, over all chosen runs. Two bands are two kinds of steps,"
        " for example with and without an evaluation, a checkpoint or a longer batch.",
        Query(by(["le"], "sum", _BUCKETS), "{{le}}", exemplars=True),
    ),
    lines(
        "Data wait",
        "percentunit",
        "Share of step time spent waiting for the DataLoader: mean and maximum of the ranks. If only one rank waits,"
        " check its disk and its host.",
        Query(by_run("avg", _DATA_WAIT), "{{torch_run_id}} mean"),
        Query(by_run("max", _DATA_WAIT), "{{torch_run_id}} worst rank"),
        width=WHOLE,
        sparse=True,
    ),
    stacked(
        "Step time by phase: $run",
        "s",
        "Time of a step of this run by phase, mean of the ranks. `between` is the time since the previous step: a"
        " loader that is not a DataLoader, logging, checkpoints. `other` is the time in no phase. On a GPU a phase is"
        " the host's time, including waiting.",
        Query(
            by_run("avg", of_process(rate("torch_phase_time_seconds_total"), _STEPS), "torch_phase"),
            "{{torch_phase}}",
        ),
        width=WHOLE,
    )
    .repeat("run")
    .max_per_row(2),
]
_THROUGHPUT = [
    lines(
        "Steps per second",
        per_second("steps"),
        "The mean of the ranks.",
        Query(by_run("avg", _STEPS)),
    ),
    lines(
        "Samples per second",
        per_second("samples"),
        "Samples that the program logs with torchotel.log(samples=…), over all ranks.",
        Query(logged("torch_samples_total")),
    ),
    lines(
        "Tokens per second",
        per_second("tokens"),
        "Tokens that the program logs with torchotel.log(tokens=…), over all ranks.",
        Query(logged("torch_tokens_total")),
    ),
    lines(
        "Evaluation",
        "percentunit",
        "Share of time spent in evaluations: batches outside of any training step, such as validation and generation.",
        Query(by_run("avg", rate("torch_evaluation_time_seconds_total"))),
    ),
]
_LEARNING = [
    lines(
        "Loss",
        "short",
        "Logged loss, mean of the ranks. A NaN is omitted here and counted below.",
        Query(by_run("avg", series("torch_loss"))),
        width=THIRD,
    ),
    lines(
        "Learning rate",
        "sci",
        "Logged learning rate, or else that of the optimizer's first parameter group.",
        Query(by_run("max", series("torch_learning_rate"))),
        width=THIRD,
    ),
    lines(
        "Gradient norm",
        "sci",
        "L2 norm over all parameters, before clipping and unscaled: the maximum of the ranks, or if parameters are"
        " sharded the root of their summed squares. The dashboard Layers shows it by layer.",
        Query(gradient_norm("torch_gradient_norm")),
        width=THIRD,
        log=True,
    ),
    lines(
        "Steps gone NaN",
        per_second("steps"),
        "Checked steps per second with a NaN or infinite loss or gradient. With a GradScaler, a gradient overflows"
        " occasionally, and the GradScaler skips that step.",
        Query(
            by_run("sum", rate("torch_step_nonfinite_total"), "torch_nonfinite_kind"),
            "{{torch_run_id}} {{torch_nonfinite_kind}}",
        ),
    ),
    lines(
        "Logged values",
        "short",
        "Values that the program logs under other names, mean of the ranks.",
        Query(by_run("avg", series("torch_log"), "torch_log_name"), "{{torch_run_id}} {{torch_log_name}}"),
    ),
]
_COST = [
    overhead(),
    steps_in_detail(),
]
_GPU = [
    lines(
        "GPU memory",
        "bytes",
        "Device memory at the end of a step, maximum of the ranks: allocated by tensors, reserved by the allocator,"
        " and the peak of tensors. A growing gap between the first two is fragmentation.",
        Query(by_run("max", series("torch_memory_allocated_bytes"), "device"), "{{torch_run_id}} {{device}} allocated"),
        Query(by_run("max", series("torch_memory_reserved_bytes"), "device"), "{{torch_run_id}} {{device}} reserved"),
        Query(by_run("max", series("torch_memory_peak_bytes"), "device"), "{{torch_run_id}} {{device}} peak"),
        width=WHOLE,
    ),
]
