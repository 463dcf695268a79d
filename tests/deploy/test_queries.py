"""Every query of dashboards, links and alerts, on a real Prometheus that scrapes a real run of two ranks."""

import json
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from support.grafana_dashboards import FILES, FOLDER, GPU_PANELS, Target, dashboard, filled, targets
from support.prometheus_server import binary, until
from support.two_rank_run import JOB, ROOT, RULES, RUN, Trained, trained

MODULES = {"Model", "encoder", "decoder"}
VALUES = {
    "torch_run_id": {RUN},
    "torch_rank": {"0", "1"},
    "torch_phase": {"between", "data", "forward", "backward", "optimizer", "other"},
    "torch_model": {"Model"},
    "torch_module_path": MODULES,
    "torch_module_type": {"Model", "Linear"},
    "torch_direction": {"forward", "backward"},
    "torch_nonfinite_kind": {"loss", "gradient"},
    "torch_gradient_scope": {"all"},
    "torchotel_outcome": {"exported", "dropped_queue", "dropped_export", "sampled_out"},
    "error_type": {"503", "none"},
    "torch_log_name": {"accuracy"},
    "torch_tensor_name": {"hidden"},
    "job": {JOB},
}
"""What a label may say here."""
OUTLIERS = {"Exploding layers", "Vanishing layers"}
"""Panels that may be empty here: no norm is far from its median."""

PROMTOOL = binary("promtool")

pytestmark = pytest.mark.skipif(binary() is None, reason="there is no prometheus, neither built nor on the path")


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    with trained(tmp_path_factory.mktemp("run")) as running:
        yield running


def expected_labels(target: Target) -> set[str]:
    """Give the labels that the outermost aggregation keeps, and the panel's legend tells of."""
    found = re.search(r"\bby \(([\w, ]+)\)", target.expr)
    assert found, target
    kept = set(found[1].split(", "))
    kept -= {"le"} if target.expr.startswith("histogram_quantile") else set()
    legend = set(re.findall(r"\{\{(\w+)\}\}", target.query["legendFormat"]))
    assert legend <= kept or target.query["format"] == "table", target
    return kept


def answer(training: Trained, target: Target, back_s: int = 10, /, **chosen: str) -> list[dict[str, Any]]:
    """Ask as Grafana does: for the present, or for some time up to it."""
    expr = filled(target.expr, **chosen)
    if target.query.get("instant"):
        return training.prometheus.query(expr)
    now_s = time.time()
    span = {"start": str(now_s - back_s), "end": str(now_s), "step": "1"}
    found: list[dict[str, Any]] = training.prometheus.get("query_range", query=expr, **span)["result"]
    return found


@pytest.mark.real_server
def test_each_query_gives_what_its_panel_shows(training: Trained) -> None:
    """Series with the labels that the panel tells apart, none of them strange; all others are known by name."""
    for target in targets():
        if target.panel in GPU_PANELS:
            assert not answer(training, target), target
            continue
        if target.panel in OUTLIERS:
            continue
        series = until(partial(answer, training, target), bool)
        labels = expected_labels(target)
        for one in series:
            assert set(one["metric"]) == labels, target
            assert all(one["metric"][name] in VALUES[name] for name in labels & set(VALUES)), one
        assert "torch_rank" not in labels or {one["metric"]["torch_rank"] for one in series} <= {"0", "1"}, target


@pytest.mark.real_server
def test_what_is_chosen_narrows_each_query(training: Trained) -> None:
    """The chosen run and rank give data, another run and another job none."""
    for target in targets():
        if target.panel in GPU_PANELS | OUTLIERS:
            continue
        series = until(partial(answer, training, target, job=JOB, run=RUN, rank="1"), bool)
        assert {one["metric"].get("torch_rank", "1") for one in series} == {"1"}, target
        assert not answer(training, target, job="another"), target
        assert not answer(training, target, run="another") or target.panel == "Targets down", target


@pytest.mark.real_server
def test_rows_of_layers_come_in_the_order_of_their_names(training: Trained) -> None:
    """As the panel says of them: Grafana draws rows in the order in which Prometheus gives the series."""
    (target,) = [one for one in targets() if one.panel == "Gradient norms by layer: $run"]
    rows = [
        one["metric"]["torch_module_path"]
        for one in until(partial(answer, training, target), lambda found: len(found) > 1)
    ]
    assert rows == sorted(rows) == ["decoder", "encoder"]


@pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool, neither built nor on the path")
def test_a_step_counts_once_in_steps_gone_nan(tmp_path: Path) -> None:
    """A step whose loss and gradient are both NaN is one step, and the same one on all ranks."""
    (expr,) = {
        target.expr for target in targets() if target.panel == "Steps gone NaN" and "increase" in target.query["expr"]
    }
    series = {
        f'target_info{{job="{JOB}", instance="{rank}", torch_run_id="{RUN}", torch_rank="{rank}"}}': "1x60"
        for rank in range(2)
    } | {
        f'torch_step_nonfinite_total{{job="{JOB}", instance="{rank}", torch_nonfinite_kind="{kind}"}}': growth
        for rank in range(2)
        for kind, growth in (("loss", "0+1x60"), ("gradient", "0+2x60"))
    }
    claim = {
        "expr": filled(expr),
        "eval_time": "60s",
        "exp_samples": [{"labels": f'{{torch_run_id="{RUN}"}}', "value": 2 * 60}],
    }
    case = {
        "interval": "1s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [claim],
    }
    file = tmp_path / "steps.yaml"
    file.write_text(yaml.safe_dump({"tests": [case]}))
    done = subprocess.run([str(PROMTOOL), "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.real_server
def test_both_ranks_are_told_apart(training: Trained) -> None:
    """Where a panel tells ranks apart, it has both."""
    for target in targets():
        if "torch_rank" in expected_labels(target) and target.panel not in GPU_PANELS:
            until(partial(ranks_of, training, target), lambda found: found == {"0", "1"})


def ranks_of(training: Trained, target: Target) -> set[str]:
    return {one["metric"]["torch_rank"] for one in answer(training, target)}


@pytest.mark.real_server
def test_each_variable_has_its_values(training: Trained) -> None:
    """As Grafana asks for them."""
    values = {"job": {JOB}, "run": {RUN}, "rank": {"0", "1"}, "module": MODULES}
    for made in map(dashboard, FILES):
        for one in made["templating"]["list"][1:]:
            (query,) = re.findall(r"label_values\((.+), (\w+)\)", filled(one["query"]))
            found = training.prometheus.get(f"label/{query[1]}/values", **{"match[]": query[0]})
            assert set(found) == values[one["name"]], one


@pytest.mark.real_server
def test_exemplars_name_traces_that_were_exported(training: Trained) -> None:
    """Under the label that the data source makes a link of."""
    (source, _) = yaml.safe_load((FOLDER / "provisioning/datasources/torchotel.yaml").read_text())["datasources"]
    (way,) = source["jsonData"]["exemplarTraceIdDestinations"]
    for target in targets():
        if target.query.get("exemplar"):
            now_s = time.time()
            span = {"start": str(now_s - 600), "end": str(now_s)}
            ask = partial(training.prometheus.get, "query_exemplars", query=filled(target.expr), **span)
            found = until(ask, bool)
            traces = {one["labels"][way["name"]] for entry in found for one in entry["exemplars"]}
            assert traces <= {span.trace_id.hex() for span in training.received.spans}


def tags_in_jaeger(training: Trained) -> dict[str, str]:
    """Give the tags of a module's span and its process, as Jaeger has them: the service's name is none of them."""
    (request, *_) = [one for one in training.received.requests if any("encoder" in span.name for span in one.spans())]
    span = next(span for span in request.spans() if "encoder" in span.name)
    attributes: list[KeyValue] = [*span.attributes, *request.message.resource_spans[0].resource.attributes]
    tags = {one.key: one.value.string_value or str(one.value.int_value) for one in attributes}
    del tags["service.name"]
    return tags


@pytest.mark.real_server
def test_a_span_leads_to_its_layer(training: Trained) -> None:
    """Both from Jaeger's own page and from Grafana's view of a trace; what they lead to is there, of its run alone."""
    tags = tags_in_jaeger(training)
    urls = {made["uid"]: made for made in map(dashboard, FILES)}
    for pattern in json.loads((ROOT / "deploy/jaeger/ui.json").read_text())["linkPatterns"]:
        assert pattern["key"] in tags
        url = urlsplit(re.sub(r"#\{([^}]+)\}", lambda found: tags[found[1]], pattern["url"]))
        made = urls[url.path.removeprefix("/d/")]
        chosen = {name.removeprefix("var-"): value for name, (value,) in parse_qs(url.query).items()}
        assert chosen["run"] == RUN
        assert set(chosen) <= {one["name"] for one in made["templating"]["list"]}
        shown = [target for target in targets() if target.dashboard == made["title"]]
        for target in (one for one in shown if one.panel not in GPU_PANELS | OUTLIERS):
            found = until(partial(answer, training, target, **chosen), bool)
            assert "module" not in chosen or {one["metric"].get("torch_module_path", "encoder") for one in found} == {
                "encoder"
            }
    sources = yaml.safe_load((FOLDER / "provisioning/datasources/torchotel.yaml").read_text())["datasources"]
    ways = sources[1]["jsonData"]["tracesToMetrics"]
    for query in ways["queries"]:
        assert training.prometheus.query(of_span(query["query"], ways["tags"], tags)), query
        of_another_run = of_span(query["query"], ways["tags"], {**tags, "torch.run.id": "another"})
        assert not training.prometheus.query(of_another_run), query


def of_span(query: str, ways: list[dict[str, str]], tags: Mapping[str, str]) -> str:
    """Put tags of a span and its process in the place of variables, as Grafana does; provisioning doubles each $."""
    labels = ", ".join(f'{way["value"]}="{tags[way["key"]]}"' for way in ways)
    query = query.replace("$$__tags", labels)
    query = re.sub(r'\$\$\{__span\.tags\["([^"]+)"\]\}', lambda found: tags[found[1]], query)
    return filled(query.replace("$$", "$"))


@pytest.mark.real_server
def test_the_rules_work_on_what_a_run_gives(training: Trained) -> None:
    """Recordings have values, and no rule fails for want of a label or too many of them."""
    rules = until(lambda: all_rules(training), lambda found: all(rule["health"] != "unknown" for rule in found))
    assert {rule["health"] for rule in rules} == {"ok"}, [rule.get("lastError") for rule in rules]
    for rule in rules:
        if rule["type"] == "recording":
            assert until(partial(training.prometheus.query, rule["name"]), bool), rule


def all_rules(training: Trained) -> list[Mapping[str, Any]]:
    return [rule for group in training.prometheus.get("rules")["groups"] for rule in group["rules"]]


@pytest.mark.real_server
def test_a_death_is_told_from_a_normal_end(training: Trained) -> None:
    """One rank ends well and takes its target away, the other raises: the rule sees that one alone.

    The last test but one here, since it ends the run.
    """
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    (died,) = [rule["expr"] for rule in rules if rule.get("alert") == "TorchRunDied"]
    processes = training.prometheus.query("target_info")
    instances = {one["metric"]["torch_rank"]: one["metric"]["instance"] for one in processes}
    assert not training.prometheus.query(died)
    training.end(0, "normally")
    training.end(1, "raise")
    until(lambda: [one["value"][1] for one in training.prometheus.query("up")], lambda found: found == ["0"])
    (found,) = training.prometheus.query(died)
    assert found["metric"]["instance"] == instances["1"]


@pytest.mark.real_server
def test_what_a_run_has_shown_stays_when_it_has_ended(training: Trained) -> None:
    """Whoever looks at the last minutes when nothing trains any more finds each panel that had data."""
    shown = [target for target in targets() if target.panel not in GPU_PANELS | OUTLIERS]
    for target in shown:
        until(partial(answer, training, target, 600, __range="600s"), bool)
    for rank in range(2):
        training.end(rank, "normally")
    until(partial(training.prometheus.query, "target_info"), lambda found: not found)
    for target in shown:
        assert answer(training, target, 600, __range="600s"), target
