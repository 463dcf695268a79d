"""Each alert fires when it should, alone, and stays silent when it should; each says why, and what to do."""

import subprocess
from pathlib import Path

import pytest
import yaml
from support.prometheus_server import binary
from support.two_rank_run import RULES, alerts

pytestmark = pytest.mark.real_server

CASES = sorted((Path(__file__).parent / "alerts").glob("*.yaml"))
PROMTOOL = binary("promtool")


@pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool, neither built nor on the path")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_fires_and_stays_silent(case: Path) -> None:
    """The file's tests say which alerts fire at which minute: those and no others."""
    done = subprocess.run([str(PROMTOOL), "test", "rules", str(case)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool, neither built nor on the path")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_a_process_may_be_told_of_twice(case: Path, tmp_path: Path) -> None:
    """With a label more: Kubernetes's are missing in what is pushed before a Collector knows the pod."""
    text = case.read_text().replace("../../../deploy", str(RULES.parents[2]))
    told = [(line, line.replace('job="train"', 'job="train", k8s_pod_name="p"')) for line in text.splitlines()]
    doubled = [one for line, again in told for one in ((line, again) if "target_info{" in line else (line,))]
    (tmp_path / case.name).write_text("\n".join(doubled))
    test_fires_and_stays_silent(tmp_path / case.name)


def test_each_alert_is_seen_both_firing_and_silent() -> None:
    """No alert is without a test of either."""
    fires: set[str] = set()
    silent: set[str] = set()
    for case in CASES:
        claims = [claim for test in yaml.safe_load(case.read_text())["tests"] for claim in test["promql_expr_test"]]
        firing = {name for name in alerts() for claim in claims if f'"{name}"' in str(claim["exp_samples"])}
        fires |= firing
        silent |= firing if any(not claim["exp_samples"] for claim in claims) else set()
    assert fires == silent == set(alerts())


@pytest.mark.parametrize("name", alerts())
def test_says_the_cause_and_the_next_step(name: str) -> None:
    """And how grave it is, and which run or process it is about."""
    rule = alerts()[name]
    assert set(rule["annotations"]) == {"summary", "cause", "next_step"}
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert "$labels.job" in rule["annotations"]["summary"]
    assert all(text.endswith(".") for text in rule["annotations"].values())
