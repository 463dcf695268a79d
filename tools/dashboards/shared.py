"""Panels and queries that several dashboards share."""

from __future__ import annotations

from grafana_foundation_sdk.builders import stat, timeseries

from tools.dashboards.panels import lines, number
from tools.dashboards.queries import Query, by_run, of_process, rate, series

STEP_TIME = of_process(rate("torch_step_duration_seconds_sum"), rate("torch_step_duration_seconds_count"))
_UNFINISHED = f"on (job, instance) {series('torch_run_finished')} == 0"
QUIET = f"(time() - {series('torch_step_last_end_time_seconds')} and {_UNFINISHED})"
_OVERHEAD = series("torchotel_overhead_ratio")


def since_the_last_step() -> stat.Panel:
    """Show the time since the last step of each run."""
    return number(
        "Since the last step",
        "s",
        "Time since the last step ended, for the rank with the longest time. It grows while a run hangs, evaluates or"
        " saves, and stops when the run has finished.",
        Query(by_run("max", QUIET)),
        orange=60,
        red=300,
    )


def overhead_now() -> stat.Panel:
    """Show the cost of detail."""
    return number(
        "Overhead",
        "percentunit",
        "Share of step time that detail costs, compared with plain steps, for the rank with the largest share. The"
        " budget is 1 % by default.",
        Query(by_run("max", _OVERHEAD)),
        orange=0.05,
        red=0.2,
    )


def overhead() -> timeseries.Panel:
    """Draw the cost of detail over time."""
    return lines(
        "Overhead",
        "percentunit",
        "Share of step time that detail costs, compared with plain steps: maximum and mean of the ranks. With"
        ' detail="auto", overhead_budget limits it to 1 % by default.',
        Query(by_run("max", _OVERHEAD), "{{torch_run_id}} worst rank"),
        Query(by_run("avg", _OVERHEAD), "{{torch_run_id}} mean"),
    )


def steps_in_detail() -> timeseries.Panel:
    """Draw the share of detailed steps."""
    return lines(
        "Steps in detail",
        "percentunit",
        "Share of steps with module spans, mean of the ranks.",
        Query(by_run("avg", series("torchotel_detail_ratio"))),
    )
