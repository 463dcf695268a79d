"""What dashboards show of runs by their scrapes: run after run on one port, ends, and norms that become NaN."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from support.grafana_dashboards import GPU_PANELS, Target, filled, targets
from support.prometheus_server import binary

pytestmark = pytest.mark.real_server

PROMTOOL = binary("promtool")
AT = "71m"
LAYER = ', torch_model="Model", torch_module_path="encoder", torch_module_type="Linear", torch_direction="forward"'
COUNTERS = [
    "torch_steps_total{%s}",
    "torch_step_nonfinite_total{%s}",
    "torch_step_duration_seconds_sum{%s}",
    "torch_step_duration_seconds_count{%s}",
    'torch_phase_time_seconds_total{%s, torch_phase="forward"}',
    'torchotel_spans_total{%s, torchotel_outcome="exported"}',
    'torchotel_spans_total{%s, torchotel_outcome="dropped_queue"}',
    f"torch_module_time_seconds_total{{%s{LAYER}}}",
    f"torch_module_calls_total{{%s{LAYER}}}",
]
SINCE = [target for target in targets() if "since the last step" in target.panel.lower()]
OUTLIERS = {"Exploding layers", "Vanishing layers"}
FAR_BACK = [
    target
    for target in targets()
    if "$__range" in target.expr
    and (target.query.get("instant") or "increase(" in target.expr)  # others look back to choose series, not for values
    and target.panel not in OUTLIERS
]


def two_runs() -> dict[str, str]:
    """Give an hour of one run, whose counters grow by 100 a minute, and ten minutes of the next, by 1."""
    process = 'job="train", instance="a"'
    return {
        f'target_info{{{process}, torch_run_id="first", torch_rank="0"}}': "1x60 stale",
        f'target_info{{{process}, torch_run_id="next", torch_rank="0"}}': "_x62 1x10",
        f"torch_module_gradient_norm{{{process}{LAYER}}}": "2000x60 stale 2x10",
        f"torch_step_last_end_time_seconds{{{process}}}": "0x60 stale 3710+60x10",
        f"torch_run_finished{{{process}}}": "0x60 stale 0x10",
        **{name % process: "0+100x60 stale 0+1x10" for name in COUNTERS},
    }


@pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool, neither built nor on the path")
@pytest.mark.parametrize("target", FAR_BACK, ids=lambda target: target.where)
def test_no_run_is_given_what_the_one_before_did(target: Target, tmp_path: Path) -> None:
    """It has grown by some ten, or is as it was ever since it began; and it is seen at all."""
    assert target.panel not in GPU_PANELS
    expr = filled(target.expr, __range="2h", __interval="30s")
    of_next = "and on (torch_run_id) target_info"
    strange = f"count(({expr}) > 20 {of_next}) or count(({expr}) < 0.5 {of_next})"
    promtool(tmp_path, two_runs(), {f"count(({expr}) {of_next})": [1], strange: []})


@pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool, neither built nor on the path")
@pytest.mark.parametrize("target", SINCE, ids=lambda target: target.where)
def test_a_run_that_has_finished_is_not_overdue(target: Target, tmp_path: Path) -> None:
    """Its process may live on for long after its last step; one that has not finished is."""
    told = {}
    for run, finished in {"done": 1, "hangs": 0}.items():
        process = f'job="train", instance="{run}"'
        told[f'target_info{{{process}, torch_run_id="{run}", torch_rank="0"}}'] = "1x80"
        told[f"torch_step_last_end_time_seconds{{{process}}}"] = "60x80"
        told[f"torch_run_finished{{{process}}}"] = f"{finished}x80"
    expr = filled(target.expr)
    of_hanging = f'sum(({expr}) and on (torch_run_id) target_info{{torch_run_id="hangs"}})'
    promtool(tmp_path, told, {f"count({expr})": [1], of_hanging: [70 * 60]})


def norms(*, ended: bool) -> dict[str, str]:
    """Give an hour of equal norms of the layers of one run, and ten minutes in which they differ."""
    process = 'job="train", instance="a"'
    later = {"steady": "2x9", "grows": "30x9", "falls": "0.1x9", "nan": "stale"}
    after = {"steady": "2x9", "grows": "30x9", "falls": "0.1x9", "nan": ""}
    return {
        f'target_info{{{process}, torch_run_id="run", torch_rank="0"}}': "1x70 stale" if ended else "1x80",
        **{
            f'torch_module_gradient_norm{{{process}, torch_model="Model", torch_module_path="{path}"}}': " ".join(
                ("2x60", values, "stale" if ended and values != "stale" else after[path])
            )
            for path, values in later.items()
        },
    }


def of_layer(expr: str, path: str) -> str:
    named = f'label_replace(vector(1), "torch_module_path", "{path}", "", "")'
    return f"sum(({expr}) and on (torch_module_path) {named})"


@pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool, neither built nor on the path")
@pytest.mark.parametrize("ended", [False, True], ids=["going on", "ended"])
def test_tables_of_norms_show_outliers_and_nan_only(tmp_path: Path, *, ended: bool) -> None:
    """A NaN norm is not scraped: the table shows NaN instead of the last finite norm, and not for a run's end."""
    (times, norm), (times_fallen, norm_fallen) = (
        [filled(target.expr, __range="2h", __interval="30s") for target in targets() if target.panel == panel]
        for panel in ("Exploding layers", "Vanishing layers")
    )
    claims: dict[str, Sequence[float]] = {}
    for column, value in ((times, 15.0), (norm, 30.0)):
        claims |= {f"count({column})": [2], of_layer(column, "grows"): [value]}
        claims |= {f"count({of_layer(f'{column} != {column}', 'nan')})": [1]}
    for column, value in ((times_fallen, 0.05), (norm_fallen, 0.1)):
        claims |= {f"count({column})": [1], of_layer(column, "falls"): [value]}
    promtool(tmp_path, norms(ended=ended), claims)


@pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool, neither built nor on the path")
def test_a_table_of_norms_is_of_one_run(tmp_path: Path) -> None:
    """The norms of the run before, and the end of its series, are no outliers of the run that takes its port."""
    for panel in sorted(OUTLIERS):
        for target in (one for one in targets() if one.panel == panel):
            expr = filled(target.expr, __range="2h", __interval="30s")
            promtool(tmp_path, two_runs(), {f"count({expr})": []})


@pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool, neither built nor on the path")
@pytest.mark.parametrize("panel", ["Largest gradient norms", "Smallest gradient norms"])
def test_a_line_of_norms_ends_in_nan(panel: str, tmp_path: Path) -> None:
    """So that the legend shows NaN, not the last finite norm."""
    (expr,) = (filled(one.expr, __range="2h", __interval="30s") for one in targets() if one.panel == panel)
    promtool(tmp_path, norms(ended=False), {f"count({expr})": [4], f"count(({expr}) != ({expr}))": [1]})
    promtool(tmp_path, norms(ended=True), {f"count({expr})": []})


@pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool, neither built nor on the path")
def test_a_run_without_export_errors_has_a_zero(tmp_path: Path) -> None:
    """A run with an error has only that one; its first scrape may be the one with the error."""
    (expr,) = (filled(target.expr, __rate_interval="5m") for target in targets() if target.panel == "Export errors")
    processes = {
        f'target_info{{job="train", instance="{run}", torch_run_id="{run}", torch_rank="0"}}': "1x80"
        for run in ("healthy", "failing")
    }
    errors = {'torchotel_export_errors_total{job="train", instance="failing", error_type="503"}': "0+60x80"}
    claims = {
        f'sum by () (({expr}) and on (torch_run_id) target_info{{instance="{run}"}})': [value]
        for run, value in (("healthy", 0), ("failing", 1))
    }
    promtool(tmp_path, processes | errors, {f"count({expr})": [2], **claims})


def promtool(folder: Path, told: Mapping[str, str], claims: Mapping[str, Sequence[float]]) -> None:
    """Hold what expressions give against what is told of each minute."""
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in told.items()],
        "promql_expr_test": [
            {"expr": expr, "eval_time": AT, "exp_samples": [{"labels": "{}", "value": value} for value in values]}
            for expr, values in claims.items()
        ],
    }
    file = folder / "case.json"
    file.write_text(json.dumps({"tests": [case]}))
    done = subprocess.run([str(PROMTOOL), "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
