"""Comparison of the ranks of a run. Each panel shows the few relevant ranks, for any number of ranks."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from tools.dashboards.frame import GPU, framed
from tools.dashboards.panels import WHOLE, Column, bars, lines, listed, number, rows
from tools.dashboards.queries import (
    Query,
    by_rank,
    by_run,
    grown,
    latest,
    least_at_end,
    most,
    most_at_end,
    of_process,
    rate,
    ratio,
    series,
)
from tools.dashboards.shared import QUIET, STEP_TIME, since_the_last_step

UID = "torchotel-ranks"
_RANK = "{{torch_run_id}} rank {{torch_rank}}"
_STEPS = rate("torch_steps_total")
_OWN = by_rank("sum", of_process(rate("torch_phase_time_seconds_total", 'torch_phase!="backward"'), _STEPS))
_LATE = " - ".join(f"{how} by (torch_run_id) ({_OWN})" for how in ("max", "avg"))
_OTHERS = f"clamp_min(1 - 1 / count by (torch_run_id) ({_OWN}), 0.5)"  # (max - avg) / (1 - 1 / count): 0 of one rank
_SKEW = f"({_LATE}) / {_OTHERS} / ({by_run('avg', STEP_TIME)} > 0)"
_WAITS = by_rank("sum", rate("torch_collective_wait_seconds_total"))
_STEPS_SHOWN = grown("sum", series("torch_steps_total"), "torch_rank")
_PHASES_SHOWN = grown("sum", series("torch_phase_time_seconds_total"), "torch_rank", "torch_phase")
_OWN_TIME_SHOWN = grown("sum", series("torch_phase_time_seconds_total", 'torch_phase!="backward"'), "torch_rank")
_HOST = "torch_rank", "host_name"
_SLOWEST = most(
    16,
    ratio(
        grown("sum", series("torch_step_duration_seconds_sum"), *_HOST),
        grown("sum", series("torch_step_duration_seconds_count"), *_HOST),
    ),
)


def ranks() -> Dashboard:
    """Make the dashboard that shows which rank delays the others."""
    return framed(
        UID,
        "Ranks",
        "Comparison of the ranks of a run, and the rank that delays the others.",
        {"At a glance": _GLANCE, "Rank by rank": _RANKS, GPU: _GPU},
    )


_GLANCE = [
    number(
        "Ranks",
        "short",
        "Scraped processes that have completed a step.",
        Query(by_run("count", series("torch_step_last_end_time_seconds"))),
    ),
    number(
        "Skew",
        "percentunit",
        "How much longer the slowest rank needs than the mean of the others until all ranks synchronise in backward,"
        " as a share of a step.",
        Query(_SKEW),
        orange=0.1,
        red=0.3,
    ),
    since_the_last_step(),
]
_RANKS = [
    lines(
        "Skew",
        "percentunit",
        "How much longer the slowest rank needs outside of backward than the mean of the others, as a share of a"
        " step. The others wait that long for its gradients. A rank that is slow in backward itself is not visible"
        " here, because all ranks wait there: see Waits by rank.",
        Query(_SKEW),
        width=WHOLE,
        sparse=True,
    ),
    rows(
        "Waits by rank: $run",
        "percentunit",
        "Share of the time in which a rank waits in collectives, for the 64 ranks that wait least, in the order of"
        " their numbers as text. In a synchronous training the others wait for the rank with the coldest colour, which"
        " waits least. Collectives are recorded with torch 2.14 or later. With NCCL, a collective counts until it is"
        " issued.",
        Query(least_at_end(64, _WAITS), "rank {{torch_rank}}"),
        low=0,
        high=0.5,
        empty="No collectives: one rank, or torch before 2.14",
    ),
    lines(
        "Time before the ranks meet",
        "s",
        "Time of a step outside of backward, for the twenty ranks with the longest time. The other ranks wait for the"
        " ranks at the top.",
        Query(most_at_end(20, _OWN), _RANK),
        sparse=True,
        many=True,
    ),
    lines(
        "Step time by rank",
        "s",
        "Mean time of a step, for the twenty ranks with the longest time. Ranks that reduce gradients together have"
        " the same step time.",
        Query(most_at_end(20, by_rank("sum", STEP_TIME)), _RANK),
        sparse=True,
        many=True,
    ),
    bars(
        "Phases by rank",
        "s",
        "Time of a step by phase on each rank in the range shown, for the 32 ranks that needed longest outside of"
        " backward. A rank with a long backward and short other phases is waiting. Choose one run.",
        f"{_PHASES_SHOWN} / on (torch_run_id, torch_rank) group_left () ({_STEPS_SHOWN} > 0) "
        f"and on (torch_run_id, torch_rank) {most(32, ratio(_OWN_TIME_SHOWN, _STEPS_SHOWN))}",
        x="torch_rank",
        parts="torch_phase",
        width=WHOLE,
    ),
    listed(
        "Slowest ranks",
        "Mean time of a step in the range shown, for the sixteen ranks with the longest time, with their host. If a"
        " rank has ended, the time since the last step is the time at its end.",
        Column("step time", "s", _SLOWEST),
        Column("since the last step", "s", f"{latest('max', QUIET, *_HOST)} and {_SLOWEST}"),
        width=WHOLE,
    ),
    lines(
        "Time since the last step",
        "s",
        "Time since the last step, for the twenty ranks with the longest time. If a run hangs, the rank that stopped"
        " first is at the top. A finished run is not shown.",
        Query(most_at_end(20, by_rank("max", QUIET)), _RANK),
        many=True,
    ),
    lines(
        "Gradient norm by rank",
        "sci",
        "Gradient norm, for the twenty ranks with the largest norm. Ranks that reduce gradients together have the"
        " same norm: if they differ, a parameter is not reduced. If parameters are sharded, the norm is that of the"
        " rank's shard.",
        Query(most_at_end(20, by_rank("max", series("torch_gradient_norm"))), _RANK),
        many=True,
    ),
    lines(
        "Loss by rank",
        "short",
        "Logged loss, for the twenty ranks with the largest loss. If one rank stays above the others, check its data.",
        Query(most_at_end(20, by_rank("max", series("torch_loss"))), _RANK),
        width=WHOLE,
        many=True,
    ),
]
_GPU = [
    lines(
        "GPU memory by rank",
        "bytes",
        "Peak memory of tensors on the device, for the twenty ranks with the largest peak.",
        Query(most_at_end(20, by_rank("max", series("torch_memory_peak_bytes"), "device")), f"{_RANK} {{{{device}}}}"),
        width=WHOLE,
        many=True,
    ),
]
