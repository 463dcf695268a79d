"""How the ranks of a run fare beside each other; each panel keeps to the few that matter, of however many there are."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from tools.dashboards.frame import GPU, framed
from tools.dashboards.panels import WHOLE, Column, bars, lines, listed, number
from tools.dashboards.queries import (
    Query,
    by_rank,
    by_run,
    grown,
    latest,
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
    """Make the dashboard that tells which rank holds up the others."""
    return framed(
        UID,
        "Ranks",
        "How the ranks of a run fare beside each other, and which one holds up the others.",
        {"At a glance": _GLANCE, "Rank by rank": _RANKS, GPU: _GPU},
    )


_GLANCE = [
    number(
        "Ranks",
        "short",
        "Processes that are scraped and have made a step.",
        Query(by_run("count", series("torch_step_last_end_time_seconds"))),
    ),
    number(
        "Skew",
        "percentunit",
        "Share of a step that the slowest rank needs longer than the others on average before they meet in backward.",
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
        "Share of a step that the slowest rank needs longer than the others on average outside of backward: they "
        "wait that long for its gradients. A rank that is slow in backward itself can't be told so, since all of "
        "them meet there: compare its layers.",
        Query(_SKEW),
        width=WHOLE,
        sparse=True,
    ),
    lines(
        "Time before the ranks meet",
        "s",
        "Time of a step outside of backward, of the twenty ranks where it is longest. The ranks on top are waited for.",
        Query(most_at_end(20, _OWN), _RANK),
        sparse=True,
        many=True,
    ),
    lines(
        "Step time by rank",
        "s",
        "The mean time of a step, of the twenty ranks where it is longest. Ranks that reduce gradients together "
        "have the same step time.",
        Query(most_at_end(20, by_rank("sum", STEP_TIME)), _RANK),
        sparse=True,
        many=True,
    ),
    bars(
        "Phases by rank",
        "s",
        "On what the time of a step went on each rank in the range shown, for the 32 that needed longest outside of "
        "backward. A long backward beside short other phases is a rank that waits. Choose one run.",
        f"{_PHASES_SHOWN} / on (torch_run_id, torch_rank) group_left () ({_STEPS_SHOWN} > 0) "
        f"and on (torch_run_id, torch_rank) {most(32, ratio(_OWN_TIME_SHOWN, _STEPS_SHOWN))}",
        x="torch_rank",
        parts="torch_phase",
        width=WHOLE,
    ),
    listed(
        "Slowest ranks",
        "The mean time of a step in the range shown, of the sixteen ranks where it was longest, and the host that "
        "they run on. The time since the last step is that at the rank's end, where it has ended.",
        Column("step time", "s", _SLOWEST),
        Column("since the last step", "s", f"{latest('max', QUIET, *_HOST)} and {_SLOWEST}"),
        width=WHOLE,
    ),
    lines(
        "Time since the last step",
        "s",
        "Of the twenty ranks where it is longest. When a run hangs, the rank that stopped first stands on top. A run "
        "that has finished has none.",
        Query(most_at_end(20, by_rank("max", QUIET)), _RANK),
        many=True,
    ),
    lines(
        "Gradient norm by rank",
        "sci",
        "Of the twenty ranks where it is largest. Ranks that reduce gradients together have the same: where they "
        "differ, a parameter is not reduced.",
        Query(most_at_end(20, by_rank("max", series("torch_gradient_norm"))), _RANK),
        many=True,
    ),
    lines(
        "Loss by rank",
        "short",
        "As logged, of the twenty ranks where it is largest. One that stays above the others points at its data.",
        Query(most_at_end(20, by_rank("max", series("torch_loss"))), _RANK),
        width=WHOLE,
        many=True,
    ),
]
_GPU = [
    lines(
        "GPU memory by rank",
        "bytes",
        "The most memory that tensors took on the device, of the twenty ranks where it is largest.",
        Query(most_at_end(20, by_rank("max", series("torch_memory_peak_bytes"), "device")), f"{_RANK} {{{{device}}}}"),
        width=WHOLE,
        many=True,
    ),
]
