"""A real Prometheus finds a running training by its target file, and shows every series and exemplars that lead on."""

import time
from pathlib import Path

import pytest
from support.metrics_training import SEEN, train
from support.otlp_http_receiver import Receiver
from support.prometheus_server import binary, prometheus_server, until

import torchotel

CONFIG = """
global: {scrape_interval: 1s}
scrape_configs:
  - job_name: training
    file_sd_configs: [{files: ["%s/*.json"], refresh_interval: 1s}]
"""

pytestmark = pytest.mark.skipif(binary() is None, reason="there is no prometheus, neither built nor on the path")


@pytest.mark.real_server
def test_prometheus_sees_a_running_training(server: Receiver, tmp_path: Path) -> None:
    """Every series under the service's name, the resource to join with, and exemplars whose traces were exported."""
    handle = torchotel.instrument(
        service_name="digits",
        endpoint=server.url.removesuffix("/v1/traces"),
        discovery_dir=tmp_path / "targets",
        module_histograms=True,
        gradient_norms=True,
        detail=2,
    )
    train()
    assert handle.flush()
    with prometheus_server(CONFIG % (tmp_path / "targets"), tmp_path) as prometheus:
        names = until(lambda: prometheus.names("digits"), lambda found: set(SEEN) <= found)
        assert {name for name in names if name.startswith("torch")} == set(SEEN)
        (steps,) = prometheus.query("torch_steps_total")
        assert float(steps["value"][1]) == handle.stats()["steps"]
        joined = "torch_steps_total * on (job, instance) group_left (torch_rank, torch_run_id) target_info"
        (one,) = prometheus.query(joined)
        assert one["metric"]["torch_rank"] == "0"
        now_s = time.time()
        query = {"query": "torch_step_duration_seconds_bucket", "start": str(now_s - 600), "end": str(now_s + 600)}
        found = until(lambda: prometheus.get("query_exemplars", **query), bool)
        shown = {(one["labels"]["trace_id"], one["labels"]["span_id"]) for entry in found for one in entry["exemplars"]}
        assert shown
        assert shown <= {
            (span.trace_id.hex(), span.span_id.hex()) for span in server.spans if span.name == "torch.step"
        }
        handle.shutdown()
        assert not list((tmp_path / "targets").iterdir())
        until(lambda: prometheus.get("targets")["activeTargets"], lambda targets: not targets)
