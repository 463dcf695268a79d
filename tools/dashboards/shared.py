"""Panels that stand on more than one dashboard, and the queries that more than one asks."""

from __future__ import annotations

from grafana_foundation_sdk.builders import stat, timeseries

from tools.dashboards.panels import lines, number
from tools.dashboards.queries import Query, by_run, of_process, rate, series

STEP_TIME = of_process(rate("torch_step_duration_seconds_sum"), rate("torch_step_duration_seconds_count"))
_UNFINISHED = f"on (job, instance) {series('torch_run_finished')} == 0"
QUIET = f"(time() - {series('torch_step_last_end_time_seconds')} and {_UNFINISHED})"
_OVERHEAD = series("torchotel_overhead_ratio")


def since_the_last_step() -> stat.Panel:
    """Show which run has been quiet, and for how long."""
    return number(
        "Since the last step",
        "s",
        "Time since the last step ended, on the rank where it is longest. It grows while a run hangs, evaluates or "
        "saves, and no more once it has finished.",
        Query(by_run("max", QUIET)),
        orange=60,
        red=300,
    )


def overhead_now() -> stat.Panel:
    """Show what looking costs."""
    return number(
        "Overhead",
        "percentunit",
        "Share of the step time that looking into modules costs, against steps without, on the rank where it is "
        "largest: the budget is 1 % by default.",
        Query(by_run("max", _OVERHEAD)),
        orange=0.05,
        red=0.2,
    )


def overhead() -> timeseries.Panel:
    """Draw what looking costs."""
    return lines(
        "Overhead",
        "percentunit",
        "Share of the step time that looking into modules costs, against steps without: the largest of the ranks and "
        'their mean. overhead_budget holds it, at 1 % by default, where detail is "auto".',
        Query(by_run("max", _OVERHEAD), "{{torch_run_id}} worst rank"),
        Query(by_run("avg", _OVERHEAD), "{{torch_run_id}} mean"),
    )


def steps_in_detail() -> timeseries.Panel:
    """Draw how many steps are looked into."""
    return lines(
        "Steps in detail",
        "percentunit",
        "Share of the steps whose modules have spans, the mean of the ranks.",
        Query(by_run("avg", series("torchotel_detail_ratio"))),
    )
