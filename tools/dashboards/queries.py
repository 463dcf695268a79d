"""PromQL that all dashboards share: `target_info` has the run and the rank of a process.

Series have no such labels, so a query selects the chosen runs and ranks by a join, and only the job is in every
selector. One port serves several runs in turn, so queries over a long window join inside the window: otherwise a run
would include the series of the previous run. Queries of tables and numbers look back over the range, because the run
may have ended; with `@ end()` Prometheus evaluates them once for all points.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

JOB = 'job=~"$job"'
PROCESSES = f'target_info{{{JOB}, torch_run_id=~"$run", torch_rank=~"$rank"}}'
RUNS = f"max by (torch_run_id) ({PROCESSES})"
RATE = "$__rate_interval"
RANGE = "$__range"


class Query(NamedTuple):
    """One target of a panel."""

    expr: str
    legend: str = "{{torch_run_id}}"
    exemplars: bool = False


def series(metric: str, *matchers: str) -> str:
    """Select series of the chosen jobs."""
    return f"{metric}{{{', '.join((JOB, *matchers))}}}"


def rate(metric: str, *matchers: str) -> str:
    """Return the growth of a counter per second."""
    return f"rate({series(metric, *matchers)}[{RATE}])"


def of_chosen(expr: str, *labels: str) -> str:
    """Keep the series of the chosen processes, with the run, the rank and further labels of each process."""
    brought = ", ".join(("torch_rank", "torch_run_id", *labels))
    one_each = f"max by (job, instance, {brought}) ({PROCESSES})"  # two series of one process would make the join fail
    return f"({expr} * on (job, instance) group_left ({brought}) {one_each})"


def by(labels: Iterable[str], how: str, expr: str) -> str:
    """Aggregate over the chosen processes by labels, which may include the host's name."""
    kept = tuple(labels)
    return f"{how} by ({', '.join(kept)}) {of_chosen(expr, *_of_process(kept))}"


def by_run(how: str, expr: str, *labels: str) -> str:
    """Aggregate over the chosen ranks of each run, by further labels."""
    return by(("torch_run_id", *labels), how, expr)


def gradient_norm(metric: str, *matchers: str, labels: Iterable[str] = ()) -> str:
    """Return the gradient norms of each run, by further labels.

    Ranks that have all parameters have the same norm. The squared norms of shards add up over the ranks.
    """
    whole = by_run("max", series(metric, 'torch_gradient_scope!="shard"', *matchers), *labels)
    shards = series(metric, 'torch_gradient_scope="shard"', *matchers)
    squares = by_run("sum", f"{shards} ^ 2", *labels)
    return f"({whole} or sqrt({squares}))"


def by_rank(how: str, expr: str, *labels: str) -> str:
    """Aggregate for each rank of each run."""
    return by_run(how, expr, "torch_rank", *labels)


def grown(how: str, expr: str, *labels: str) -> str:
    """Aggregate the growth of counters in the whole range over the chosen ranks."""
    return _each_run(how, f"increase({_shown(expr, labels)})", labels)


def latest(how: str, expr: str, *labels: str) -> str:
    """Aggregate the last values of gauges in the whole range over the chosen ranks."""
    return _each_run(how, f"last_over_time({_shown(expr, labels)})", labels)


def _shown(expr: str, labels: Iterable[str]) -> str:
    return f"{of_chosen(expr, *_of_process(labels))}[{RANGE}:$__interval] @ end()"


def _each_run(how: str, expr: str, labels: Iterable[str]) -> str:
    return f"{how} by ({', '.join(('torch_run_id', *labels))}) ({expr})"


def _of_process(labels: Iterable[str]) -> set[str]:
    return {"host_name"} & {*labels}


def quantile(share: float, buckets: str) -> str:
    """Estimate a quantile of a histogram over the chosen ranks of each run."""
    return f"histogram_quantile({share}, {by_run('sum', buckets, 'le')})"


def of_process(part: str, whole: str) -> str:
    """Divide the series of a process by its one series of another metric; empty if that series is 0."""
    return f"{part} / on (job, instance) group_left () ({whole} > 0)"


def ratio(part: str, whole: str) -> str:
    """Divide; the result is empty if the divisor is 0."""
    return f"{part} / ({whole} > 0)"


def most(count: int, expr: str) -> str:
    """Keep the largest series."""
    return f"topk({count}, {expr})"


def most_at_end(count: int, expr: str) -> str:
    """Keep the series with the largest last values in the range, for the whole range.

    `topk` alone selects series at each point separately, so more than `count` series would appear and disappear.
    """
    return f"{expr} and {most(count, at_end(expr))}"


def least_at_end(count: int, expr: str) -> str:
    """Keep the series with the smallest last values in the range, for the whole range."""
    return f"{expr} and bottomk({count}, {at_end(expr)})"


def at_end(expr: str) -> str:
    """Return the last values in the range. Prometheus evaluates them once, also in a query over the range."""
    return f"last_over_time(({expr})[{RANGE}:$__interval] @ end())"


def median(expr: str) -> str:
    """Return the medians in the range."""
    return f"quantile_over_time(0.5, ({expr})[{RANGE}:$__interval] @ end())"


def or_nan(expr: str) -> str:
    """Add NaN for the series of a run that have ended while the run goes on, since a NaN gauge is not scraped."""
    return f"({expr} or {at_end(expr)} * NaN and on (torch_run_id) {RUNS})"
