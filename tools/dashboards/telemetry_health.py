"""Whether what the other dashboards show is whole: what was dropped, what failed, what it costs."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from tools.dashboards.frame import framed
from tools.dashboards.panels import lines, number, stacked
from tools.dashboards.queries import Query, by_run, grown, rate, series
from tools.dashboards.shared import overhead, overhead_now, steps_in_detail

UID = "torchotel-telemetry"
_DROPPED = 'torchotel_outcome=~"dropped_.+"'


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
        Query(grown("sum", series("torchotel_spans_total", 'torchotel_outcome="exported"'))),
    ),
    number(
        "Spans dropped",
        "short",
        "In the range shown: the queue was full, or the endpoint took none for longer than the retries last.",
        Query(grown("sum", series("torchotel_spans_total", _DROPPED))),
        red=0.5,
    ),
    overhead_now(),
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
        "cps",
        "Spans a second. `sampled_out` is OTEL_TRACES_SAMPLER's decision, dropped_queue a worker that can't keep up, "
        "dropped_export an endpoint that fails for too long.",
        Query(
            by_run("sum", rate("torchotel_spans_total"), "torchotel_outcome"), "{{torch_run_id}} {{torchotel_outcome}}"
        ),
    ),
    lines(
        "Export errors",
        "cps",
        "Failed attempts a second by the error; one that is retried counts at each. `torchotel doctor` says why.",
        Query(by_run("sum", rate("torchotel_export_errors_total"), "error_type"), "{{torch_run_id}} {{error_type}}"),
    ),
    overhead(),
    steps_in_detail(),
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
