"""The committed dashboards come from their code, and keep the rules of Grafana's dashboard-linter.

Rules by their names at https://github.com/grafana/dashboard-linter. Two are kept in another way: template-instance-rule
and target-instance-rule ask for a variable of instances, here run and rank say which processes are meant.
"""

import math
import re
from typing import Any

import pytest
import yaml
from support.grafana_dashboards import FILES, FOLDER, GLOBALS, SELECTOR, VARIABLE, dashboard, panels, targets

from tools.dashboards.generated import generated
from torchotel.metrics.instruments import TABLE

UNITS = {"short", "s", "percentunit", "bytes", "sci", "none"}
SOURCE = {"type": "prometheus", "uid": "$datasource"}
OTHERS = {"target_info", "up", "scrape_duration_seconds", "scrape_samples_scraped"}
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
METRICS = OTHERS | {f"{one.prometheus_name}{suffix}" for one in TABLE for suffix in SUFFIXES[one.kind]}
each_dashboard = pytest.mark.parametrize("made", [dashboard(path) for path in FILES], ids=lambda made: made["uid"])


def test_what_is_committed_is_what_the_code_gives() -> None:
    """`make dashboards` changes nothing."""
    written = {str(path.relative_to(FOLDER)): path.read_text(encoding="utf-8") for path in FILES}
    alerting = "provisioning/alerting/torchotel.yaml"
    written[alerting] = (FOLDER / alerting).read_text(encoding="utf-8")
    assert written == generated()


@each_dashboard
def test_has_the_variables(made: dict[str, Any]) -> None:
    """template-datasource-rule, template-job-rule, template-on-time-change-reload-rule, template-label-promql-rule."""
    source, *chosen = made["templating"]["list"]
    assert (source["name"], source["label"], source["type"], source["query"]) == (
        "datasource",
        "Data source",
        "datasource",
        "prometheus",
    )
    assert [one["name"] for one in chosen][:3] == ["job", "run", "rank"]
    for one in chosen:
        assert one["type"] == "query"
        assert one["label"] == one["name"].title()
        assert one["datasource"] == SOURCE
        assert (one["multi"], one["includeAll"], one["allValue"], one["refresh"]) == (True, True, ".+", 2)
        assert re.fullmatch(r"label_values\(\w+\{.+\}, \w+\)", one["query"])


@each_dashboard
def test_is_not_editable(made: dict[str, Any]) -> None:
    """uneditable-dashboard: what is changed in the browser would be lost at the next start."""
    assert made["editable"] is False


@each_dashboard
def test_links_to_the_others(made: dict[str, Any]) -> None:
    """With the chosen variables and the time."""
    (link,) = made["links"]
    assert link["includeVars"]
    assert link["keepTime"]
    assert set(link["tags"]) <= set(made["tags"])


@each_dashboard
def test_each_panel_explains_itself(made: dict[str, Any]) -> None:
    """panel-title-description-rule, panel-units-rule, panel-datasource-rule, panel-no-targets-rule."""
    for panel in panels(made):
        assert panel["title"]
        assert panel["description"].endswith(".")
        unit = panel["fieldConfig"]["defaults"]["unit"]
        assert unit in UNITS or PER_SECOND.fullmatch(unit)
        assert panel["datasource"] == SOURCE
        assert panel["targets"]


@each_dashboard
def test_panels_lie_side_by_side(made: dict[str, Any]) -> None:
    """None lies on another, and each has a number of its own, which links rely on."""
    taken: set[tuple[int, int]] = set()
    for panel in made["panels"]:
        at = panel["gridPos"]
        covers = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not covers & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= covers
    numbers = [one["id"] for panel in made["panels"] for one in (panel, *panel.get("panels", ()))]
    assert len(set(numbers)) == len(numbers)


JOINED = r"\* on \(job, instance\) group_left \(([\w, ]+)\) max by \(job, instance, \1\) \(target_info\{([^}]*)\}\)"


def test_each_query_keeps_to_the_chosen() -> None:
    """target-job-rule; and in the place of target-instance-rule, the join with the processes of the run and rank."""
    for target in targets():
        selectors = SELECTOR.findall(target.expr)
        assert {name for name, _ in selectors} <= METRICS, target
        assert all('job=~"$job"' in matchers for _, matchers in selectors), target
        joined = re.findall(JOINED, target.expr)
        assert joined or {name for name, _ in selectors} == {"up"}, target
        assert all(
            'torch_run_id=~"$run"' in matchers and 'torch_rank=~"$rank"' in matchers for _, matchers in joined
        ), target


def test_what_is_asked_for_once_looks_back() -> None:
    """At the end of the time that is shown a run may have ended."""
    for target in (one for one in targets() if one.query.get("instant")):
        assert "[$__range:$__interval]" in target.expr, target
        assert not RATE.search(target.expr), target


def test_no_metric_goes_without_matchers() -> None:
    """Which the tests above would not see."""
    for target in targets():
        names = "|".join(sorted(METRICS, key=len, reverse=True))
        assert not re.search(rf"\b({names})\b(?!\{{)", target.expr), target


COUNTER = re.compile(r"\w+_(?:total|bucket|sum|count)\{")
RATE = re.compile(r"rate\((\w+)\{[^}]*\}\[([^\]]+)\]\)")
GROWTH = re.compile(r"increase\(\((.+?) \* on \(job, instance\) .+?\)\[([^\]]+)\] @ end\(\)\)")


def test_counters_are_seen_by_their_growth() -> None:
    """target-counter-agg-rule; over a long window as a counter of one run, since a port serves run after run."""
    for target in targets():
        seen = sum(
            len(COUNTER.findall(found[0])) for found in (*RATE.finditer(target.expr), *GROWTH.finditer(target.expr))
        )
        assert len(COUNTER.findall(target.expr)) == seen, target


ONCE = "[$__range:$__interval] @ end()"


def test_rates_fit_the_scrape_interval() -> None:
    """target-rate-interval-rule; what needs the whole range is evaluated once, at its end."""
    for target in targets():
        assert {window for _, window in RATE.findall(target.expr)} <= {"$__rate_interval"}, target
        assert {window for _, window in GROWTH.findall(target.expr)} <= {"$__range:$__interval"}, target
        assert target.query.get("instant") or "$__range" not in target.expr.replace(ONCE, ""), target


@each_dashboard
def test_every_variable_is_there(made: dict[str, Any]) -> None:
    """A query names no variable that the dashboard lacks."""
    names = {one["name"] for one in made["templating"]["list"]}
    for panel in panels(made):
        for query in panel["targets"]:
            assert set(VARIABLE.findall(query["expr"])) <= names | set(GLOBALS)


@each_dashboard
def test_no_heatmap_hides_what_its_query_gives(made: dict[str, Any]) -> None:
    """Grafana draws what is above a bound: of counts all but 0, of logarithms all that there are."""
    smallest_log = math.log10(math.ulp(0.0))
    for panel in (one for one in panels(made) if one["type"] == "heatmap"):
        (query,) = panel["targets"]
        hidden = panel["options"]["filterValues"]
        assert hidden["le"] < (smallest_log if "log10(" in query["expr"] else 1e-6), panel["title"]
        assert "ge" not in hidden


PER_SECOND = re.compile(r"count:\w+/s")
"""Grafana's unit for a count per second, with the noun: `count:steps/s` is drawn as 12 K steps/s."""
COUNTED = re.compile(r"\w+ by \([^)]+\) \(rate\((?!\w+_seconds)[^/]+")


@each_dashboard
def test_what_is_counted_in_a_second_has_a_unit_that_says_so(made: dict[str, Any]) -> None:
    """A count's rate is /s; seconds in a second are a share, as are counts by another count."""
    for panel in (one for one in panels(made) if one["type"] != "heatmap"):
        counted = all(COUNTED.fullmatch(query["expr"]) for query in panel["targets"])
        assert bool(PER_SECOND.fullmatch(panel["fieldConfig"]["defaults"]["unit"])) == counted, panel["title"]


@each_dashboard
def test_numbers_list_runs_in_one_order(made: dict[str, Any]) -> None:
    """Prometheus sorts the series of a query over a range by their labels, and not those of an instant query."""
    for panel in (one for one in panels(made) if one["type"] == "stat"):
        assert not any(query.get("instant") for query in panel["targets"]), panel["title"]


@each_dashboard
def test_no_line_goes_on_where_there_is_nothing(made: dict[str, Any]) -> None:
    """A value that is left out, and the time between two runs, are gaps; times of what is rare have none in minutes."""
    for panel in (one for one in panels(made) if one["type"] == "timeseries"):
        joined = panel["fieldConfig"]["defaults"]["custom"]["spanNulls"]
        assert joined is False or all("rate(" in query["expr"] for query in panel["targets"]), panel["title"]
        assert joined is False or 1 < joined <= 300_000


def test_step_time_leads_to_traces() -> None:
    """The panel asks for exemplars, and the data source knows the way from one to Jaeger."""
    asking = {target.panel for target in targets() if target.query.get("exemplar")}
    assert asking == {"Step time", "Steps by their duration"}
    sources = yaml.safe_load((FOLDER / "provisioning/datasources/torchotel.yaml").read_text())["datasources"]
    by_uid = {source["uid"]: source for source in sources}
    (way,) = by_uid["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert way["name"] == "trace_id"
    assert by_uid[way["datasourceUid"]]["type"] == "jaeger"
    assert by_uid[by_uid["jaeger"]["jsonData"]["tracesToMetrics"]["datasourceUid"]]["type"] == "prometheus"
