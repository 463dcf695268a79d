"""Completeness of the data on the other dashboards: drops, failures and cost."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from tools.dashboards.frame import framed
from tools.dashboards.panels import lines, number, per_second, stacked
from tools.dashboards.queries import RUNS, Query, by_run, grown, rate, series
from tools.dashboards.shared import overhead, overhead_now, steps_in_detail

UID = "torchotel-telemetry"
_EXPORT_ERRORS = by_run("sum", rate("torchotel_export_errors_total"), "error_type")
_NO_ERRORS = f'label_replace(0 * {RUNS}, "error_type", "none", "", "")'
_DROPPED = 'torchotel_outcome=~"dropped_.+"'


def telemetry_health() -> Dashboard:
    """Make the dashboard for cases of missing data."""
    return framed(
        UID,
        "Telemetry health",
        "Completeness of traces and metrics: drops, failures and cost.",
        {"At a glance": _GLANCE, "Traces": _TRACES, "Metrics": _METRICS},
    )


_GLANCE = [
    number(
        "Spans exported",
        "short",
        "In the range shown.",
        Query(grown("sum", series("torchotel_spans_total", 'torchotel_outcome="exported"'))),
    ),
    number(
        "Spans dropped",
        "short",
        "Dropped spans in the range shown: the queue was full, or the endpoint failed for longer than the retries"
        " last.",
        Query(grown("sum", series("torchotel_spans_total", _DROPPED))),
        red=0.5,
    ),
    overhead_now(),
    number(
        "Targets down",
        "short",
        "Processes of the job that Prometheus cannot scrape: they died, or their port is unreachable.",
        Query(f"count by (job) ({series('up')}) - sum by (job) ({series('up')})", "{{job}}"),
        red=0.5,
    ),
]
_TRACES = [
    stacked(
        "Spans by outcome",
        per_second("spans"),
        "Spans per second. `sampled_out`: decided by OTEL_TRACES_SAMPLER. `dropped_queue`: the worker is too slow."
        " `dropped_export`: the endpoint failed for too long.",
        Query(
            by_run("sum", rate("torchotel_spans_total"), "torchotel_outcome"), "{{torch_run_id}} {{torchotel_outcome}}"
        ),
    ),
    lines(
        "Export errors",
        per_second("errors"),
        "Failed attempts per second by error; each retry counts. A run without errors has the line `none`, at 0."
        " `torchotel doctor` shows the cause.",
        Query(f"{_EXPORT_ERRORS} or on (torch_run_id) {_NO_ERRORS}", "{{torch_run_id}} {{error_type}}"),
    ),
    overhead(),
    steps_in_detail(),
]
_METRICS = [
    lines(
        "Processes scraped",
        "short",
        "Number of processes of a run that Prometheus can scrape. It falls when a process dies or ends, or its port"
        " becomes unreachable.",
        Query(by_run("sum", series("up"))),
    ),
    lines(
        "Scrape duration",
        "s",
        "The longest scrape of a run. A response for 500 layers takes about 4 ms of the training process.",
        Query(by_run("max", series("scrape_duration_seconds"))),
    ),
    lines(
        "Samples per scrape",
        "short",
        "Samples per scrape, over all processes of a run. Multiplied by the scrapes per day, this is what Prometheus"
        " stores per day.",
        Query(by_run("sum", series("scrape_samples_scraped"))),
    ),
]
