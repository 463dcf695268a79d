"""Whether what the other dashboards show is whole: what was dropped, what failed, what it costs."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from tools.dashboards.frame import framed
from tools.dashboards.panels import lines, number, stacked
from tools.dashboards.queries import Query, by_run, grown, rate, series

UID = "torchotel-telemetry"
_DROPPED = 'outcome=~"dropped_.+"'


def telemetry_health() -> Dashboard:
    """Make the dashboard that one opens when something seems to be missing."""
    return framed(
        UID,
        "Telemetry health",
        "Whether traces and metrics are whole: what was dropped, what failed, and what they cost.",
        {"At a glance": _GLANCE, "Traces": _TRACES, "Metrics": _METRICS},
    )


_GLANCE = [
    number(
        "Spans exported",
        "short",
        "In the range shown.",
        Query(grown("sum", series("torchotel_spans_total", 'outcome="exported"'))),
    ),
    number(
        "Spans dropped",
        "short",
        "In the range shown: the queue was full, or the endpoint took none for longer than the retries last.",
        Query(grown("sum", series("torchotel_spans_total", _DROPPED))),
        red=0.5,
    ),
    number(
        "Overhead",
        "percentunit",
        "Share of the step time that looking into modules costs, on the rank where it is largest.",
        Query(by_run("max", series("torchotel_overhead_ratio"))),
        orange=0.05,
        red=0.2,
    ),
    number(
        "Targets down",
        "short",
        "Processes of the job that Prometheus can't scrape: they died, or their port can't be reached.",
        Query(f"count by (job) ({series('up')}) - sum by (job) ({series('up')})", "{{job}}"),
        red=0.5,
    ),
]
_TRACES = [
    stacked(
        "Spans by outcome",
        "short",
        "Spans a second. `sampled_out` is OTEL_TRACES_SAMPLER's decision, dropped_queue a worker that can't keep up, "
        "dropped_export an endpoint that fails for too long.",
        Query(by_run("sum", rate("torchotel_spans_total"), "outcome"), "{{torch_run_id}} {{outcome}}"),
    ),
    lines(
        "Export errors",
        "short",
        "Failed attempts a second by the error; one that is retried counts at each. `torchotel doctor` says why.",
        Query(by_run("sum", rate("torchotel_export_errors_total"), "error_type"), "{{torch_run_id}} {{error_type}}"),
    ),
    lines(
        "Overhead",
        "percentunit",
        "Share of the step time that looking into modules costs, against steps without: the largest of the ranks and "
        "their mean.",
        Query(by_run("max", series("torchotel_overhead_ratio")), "{{torch_run_id}} worst rank"),
        Query(by_run("avg", series("torchotel_overhead_ratio")), "{{torch_run_id}} mean"),
    ),
    lines(
        "Steps in detail",
        "percentunit",
        "Share of the steps whose modules have spans, the mean of the ranks.",
        Query(by_run("avg", series("torchotel_detail_ratio"))),
    ),
]
_METRICS = [
    lines(
        "Processes scraped",
        "short",
        "How many processes of a run answer. It falls when one dies, ends, or its port can't be reached.",
        Query(by_run("sum", series("up"))),
    ),
    lines(
        "Scrape duration",
        "s",
        "The longest of a run. An answer for 500 layers takes some 4 ms of the training process.",
        Query(by_run("max", series("scrape_duration_seconds"))),
    ),
    lines(
        "Samples per scrape",
        "short",
        "Over all processes of a run: times the scrapes in a day it is what Prometheus stores.",
        Query(by_run("sum", series("scrape_samples_scraped"))),
    ),
]
