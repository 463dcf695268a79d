"""What dashboards say of a run that takes the port of the one before it: nothing that the other did."""

import json
import subprocess
from pathlib import Path

import pytest
from grafana import GPU_PANELS, Target, filled, targets
from prometheus_server import binary

PROMTOOL = binary("promtool")
AT = "71m"
LAYER = ', model="Model", module="encoder", type="Linear", direction="forward"'
COUNTERS = [
    "torch_steps_total{%s}",
    "torch_loss_nonfinite_total{%s}",
    "torch_gradient_nonfinite_total{%s}",
    'torchotel_spans_total{%s, outcome="exported"}',
    'torchotel_spans_total{%s, outcome="dropped_queue"}',
    f"torch_module_time_seconds_total{{%s{LAYER}}}",
    f"torch_module_calls_total{{%s{LAYER}}}",
]
FAR_BACK = [target for target in targets() if "$__range" in target.expr or "_over_time" in target.expr]


def two_runs() -> dict[str, str]:
    """Give an hour of one run, whose counters grow by 100 a minute, and ten minutes of the next, by 1."""
    process = 'job="train", instance="a"'
    return {
        f'target_info{{{process}, torch_run_id="first", torch_rank="0"}}': "1x60 stale",
        f'target_info{{{process}, torch_run_id="next", torch_rank="0"}}': "_x62 1x10",
        f"torch_module_gradient_norm{{{process}{LAYER}}}": "2000x60 stale 2x10",
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
    claims = [
        {"expr": f"count(({expr}) {of_next})", "eval_time": AT, "exp_samples": [{"labels": "{}", "value": 1}]},
        {"expr": strange, "eval_time": AT, "exp_samples": []},
    ]
    told = [{"series": name, "values": values} for name, values in two_runs().items()]
    case = {"tests": [{"interval": "1m", "input_series": told, "promql_expr_test": claims}]}
    file = tmp_path / "case.json"
    file.write_text(json.dumps(case))
    done = subprocess.run([str(PROMTOOL), "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
