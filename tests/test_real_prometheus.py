"""A real Prometheus finds a running training by its target file, and shows every series and exemplars that lead on."""

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
from receiver import Receiver
from test_metrics_ways_out import SEEN, train

import torchotel

BINARY = shutil.which("prometheus")
CONFIG = """
global: {scrape_interval: 1s}
scrape_configs:
  - job_name: training
    file_sd_configs: [{files: ["%s/*.json"], refresh_interval: 1s}]
"""
PATIENCE_S = 60
Found = TypeVar("Found")

pytestmark = pytest.mark.skipif(BINARY is None, reason="there is no prometheus on the path")


class Prometheus:
    """A server's HTTP API."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/"

    def get(self, path: str, **query: str) -> Any:
        with urlopen(f"{self._url}{path}?{urlencode(query)}", timeout=10) as answer:  # noqa: S310  # http, as above
            return json.load(answer)["data"]

    def names(self) -> set[str]:
        return {one["metric"]["__name__"] for one in self.get("query", query='{job="training"}')["result"]}


def until(ask: Callable[[], Found], good: Callable[[Found], bool]) -> Found:
    """Ask until the answer is good."""
    deadline_s = time.monotonic() + PATIENCE_S
    answer: object = None
    while time.monotonic() < deadline_s:
        try:
            answer = found = ask()
            if good(found):
                return found
        except URLError as error:  # it is starting
            answer = error
        time.sleep(0.2)  # it tells nobody when it has scraped
    raise AssertionError(f"the last answer was {answer}")


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Prometheus]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = tmp_path / "prometheus.yml"
    config.write_text(CONFIG % (tmp_path / "targets"))
    command = [
        str(BINARY),
        f"--config.file={config}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
    ]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        yield Prometheus(port)
    finally:
        server.terminate()
        server.wait()


def test_prometheus_sees_a_running_training(prometheus: Prometheus, server: Receiver, tmp_path: Path) -> None:
    """Every series, the resource to join with, and exemplars whose traces were exported."""
    handle = torchotel.instrument(
        endpoint=server.url.removesuffix("/v1/traces"),
        discovery_dir=tmp_path / "targets",
        module_histograms=True,
        gradient_norms=True,
        detail=2,
    )
    train()
    assert handle.flush()
    names = until(prometheus.names, lambda found: set(SEEN) <= found)
    assert {name for name in names if name.startswith("torch")} == set(SEEN)
    (steps,) = prometheus.get("query", query="torch_steps_total")["result"]
    assert float(steps["value"][1]) == handle.stats()["steps"]
    joined = "torch_steps_total * on (job, instance) group_left (torch_rank, torch_run_id) target_info"
    (one,) = prometheus.get("query", query=joined)["result"]
    assert one["metric"]["torch_rank"] == "0"
    now_s = time.time()
    query = {"query": "torch_step_duration_seconds_bucket", "start": str(now_s - 600), "end": str(now_s + 600)}
    found = until(lambda: prometheus.get("query_exemplars", **query), bool)
    shown = {(one["labels"]["trace_id"], one["labels"]["span_id"]) for entry in found for one in entry["exemplars"]}
    assert shown
    assert shown <= {(span.trace_id.hex(), span.span_id.hex()) for span in server.spans if span.name == "torch.step"}
    handle.shutdown()
    assert not list((tmp_path / "targets").iterdir())
    until(lambda: prometheus.get("targets")["activeTargets"], lambda targets: not targets)
